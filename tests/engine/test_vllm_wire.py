"""`rankgate engine --wire vllm` as a stock frontend sees it."""
import signal
import struct
import time

import pytest
import zmq
from frontend import ABORT, ADD, START_DP_WAVE, UTILITY, pack

READY_KEYS = {
    "max_model_len", "num_gpu_blocks", "block_size", "dp_stats_address", "dtype", "vllm_version", "world_size", "data_parallel_size",
    "kv_cache_size_tokens", "kv_cache_max_concurrency", "tensor_parallel_size", "pipeline_parallel_size", "decode_context_parallel_size",
    "data_parallel_rank", "max_num_seqs", "max_num_batched_tokens", "instance_id", "kv_events_config", "supports_lora", "max_loras",
    "mamba_block_size", "weight_transfer_backend", "enable_sleep_mode", "supports_draft_weight_updates", "effective_attention_block_size"}
STATS_KEYS = {"num_running_reqs", "num_waiting_reqs", "step_counter", "current_wave", "kv_cache_usage", "prefix_cache_stats",
              "kv_cache_eviction_events"}


def test_registers_with_the_full_ready_response(vllm):
    vllm.start(0, "--max-model-len", "512")
    assert vllm.hello[0] == {"status": "HELLO", "local": False, "headless": True}
    assert vllm.ready[0]["status"] == "READY" and "parallel_config_hash" not in vllm.ready[0]
    assert READY_KEYS <= set(vllm.facts[0])
    assert vllm.facts[0]["data_parallel_size"] == 1 and vllm.facts[0]["max_model_len"] == 512


@pytest.mark.parametrize("scheme", ["tcp", "abstract"])
def test_data_sockets_need_not_be_files(make_vllm, scheme):
    frontend = make_vllm(scheme=scheme)
    frontend.start(0)
    assert len(frontend.run("r", max_tokens=7)) == 7


def test_serves_and_reports_an_idle_rank_in_the_terminal_message(vllm):
    vllm.start(0)
    assert len(vllm.run("r", max_tokens=7)) == 7
    assert vllm.finish("r") == 1
    first = vllm.rows("r")[0]
    assert first[11]["num_prompt_tokens"] == 3 and len(first) == 18
    _, last = vllm.messages[-1]
    assert len(last) == 9 and STATS_KEYS <= set(last[2])
    assert (last[2]["num_running_reqs"], last[2]["num_waiting_reqs"], last[2]["kv_cache_usage"]) == (0, 0, 0.0)
    before = len(vllm.messages)
    vllm.pump(0.3)
    assert len(vllm.messages) == before, "an idle rank is silent"


@pytest.mark.parametrize("size", [9, 12, 20, 21])
def test_takes_every_length_of_add(vllm, size):
    vllm.start(0)
    assert len(vllm.run("r", size=size)) == 4


def test_stop_token_and_eos(vllm):
    vllm.start(0)
    tokens = vllm.run("free", max_tokens=8)
    assert vllm.run("stop", max_tokens=8, stop_token_ids=[tokens[3]]) == tokens[:4]
    assert vllm.rows("stop")[-1][5:7] == [0, tokens[3]]
    assert vllm.run("eos", max_tokens=8, _eos_token_id=tokens[2]) == tokens[:3]
    assert vllm.rows("eos")[-1][5:7] == [0, None]


def test_logprobs_have_the_shape_of_the_real_engine(vllm):
    vllm.start(0)
    vllm.run("r", max_tokens=2, logprobs=2, prompt_logprobs=1, prompt=(5, 6, 7, 8))
    ids, values, ranks, cu = vllm.rows("r")[0][2]
    assert ids[0] == "<i4" and ids[1] == [1, 3] and values[1] == [1, 3] and ranks[1] == [1] and cu is None
    assert struct.unpack("<i", ids[2].data[:4])[0] == vllm.tokens("r")[0]
    assert vllm.rows("r")[0][3][0][1] == [3, 2], "prompt positions 1 to 3"


def test_two_clients_get_their_own_outputs(make_vllm):
    frontend = make_vllm(clients=2)
    frontend.start(0)
    frontend.add("a", client=0)
    frontend.add("b", client=1)
    assert frontend.pump(10, lambda: frontend.finish("a") is not None and frontend.finish("b") is not None)
    assert not frontend.rows("a", client=1) and not frontend.rows("b", client=0)
    assert frontend.utility("is_sleeping", client=1) is False


def test_a_coordinator_gets_the_counts(make_vllm):
    frontend = make_vllm(coordinator=True)
    frontend.start(0)
    frontend.run("r")
    assert frontend.pump(5, lambda: frontend.coordinator_messages and frontend.coordinator_messages[-1][2]["num_running_reqs"] == 0)
    assert any("r" in (m[5] or []) for _, m in frontend.messages)


def test_bad_input_over_the_wire_leaves_the_rank_alive(vllm):
    vllm.start(0, "--max-model-len", "512", "--sim-step-us", "2000", "--sim-vocab-size", "1024", "--sim-last-token", "900")
    vllm.add("healthy", max_tokens=100)
    good = [None, {"max_tokens": 4}]
    bad = {
        "temperature": {"temperature": 3.0}, "negative": {"temperature": -1.0}, "nan": {"temperature": float("nan")}, "top_p": {"top_p": 0.0},
        "logprobs": {"logprobs": -5}, "text": {"temperature": "hot"}, "bias": {"logit_bias": {2000: 1.0}}, "kinds": {"structured_outputs": {}},
    }
    for name, change in bad.items():
        vllm.add(f"bad-{name}", **change)
    vllm.add("bad-empty", prompt=())
    vllm.add("bad-oov", prompt=(5000,))
    vllm.add("bad-huge", prompt=(1 << 40,))
    vllm.add("bad-long", prompt=(5,) * 512)
    vllm.add("bad-short", size=8)
    for kind, payload in ((ADD, b""), (ADD, b"\xc1"), (ABORT, b"\x05"), (ABORT, b"\xc0"), (b"\x07", pack(good)), (b"", b""), (b"\x04", b""),
                          (b"\x05", b""), (UTILITY, pack([0, 1, "x"])), (START_DP_WAVE, pack([1, None]))):
        vllm.send(kind, payload)
    vllm.ins[0].send_multipart([b"\0\0", ADD])
    vllm.add("healthy")  # a live id again
    names = [f"bad-{n}" for n in bad] + ["bad-empty", "bad-oov", "bad-huge", "bad-long", "bad-short"]
    assert vllm.pump(20, lambda: all(vllm.finish(n) is not None for n in names + ["healthy"]))
    assert {vllm.finish(n) for n in names} == {3}
    assert vllm.finish("healthy") == 1 and len(vllm.tokens("healthy")) == 100
    assert len(vllm.run("after")) == 4
    assert vllm.dead == 0 and not vllm.disconnected("input") and not vllm.disconnected("output")


def test_an_abort_frees_the_rank_and_is_told_without_traffic(vllm):
    vllm.start(0, "--sim-step-us", "1000000")
    vllm.add("r", max_tokens=1000)
    assert vllm.pump(10, lambda: vllm.rows("r"))
    vllm.send(ABORT, pack(["r"]))
    assert vllm.pump(5, lambda: vllm.stats()["num_running_reqs"] == 0)
    assert vllm.finish("r") is None, "a client's abort has no row"
    assert vllm.utility("rankgate_stats")["aborts"] == 1


def test_utilities(vllm):
    vllm.start(0)
    assert vllm.utility("is_sleeping") is False
    assert vllm.utility("get_supported_tasks") == ["generate"]
    assert vllm.utility("pause_scheduler", "keep", False) is None
    vllm.add("queued")
    assert not vllm.pump(0.3, lambda: vllm.rows("queued"))
    assert vllm.utility("is_scheduler_paused") is True
    assert vllm.utility("resume_scheduler") is None
    assert vllm.pump(5, lambda: vllm.finish("queued") == 1)
    assert "failed" in vllm.utility("no_such_thing")
    assert "LoRA" in vllm.utility("list_loras")
    assert vllm.utility("reset_prefix_cache") is True


def test_a_restarted_frontend_finds_the_rank_and_its_outputs(vllm):
    vllm.start(0, "--sim-step-us", "40000")
    vllm.add("r", max_tokens=60)
    assert vllm.pump(10, lambda: len(vllm.tokens("r")) > 3)
    vllm.close_data()
    time.sleep(0.5)
    vllm.open_data(1)
    assert vllm.pump(20, lambda: vllm.finish("r") == 1)
    assert len(vllm.tokens("r")) == 60, "nothing lost while nobody was bound"
    assert len(vllm.run("again")) == 4


@pytest.mark.parametrize("number", (signal.SIGTERM, signal.SIGHUP))
def test_sigterm_or_a_hangup_ends_running_requests_with_abort(vllm, number):
    process = vllm.start(0, "--sim-step-us", "5000")
    vllm.add("r", max_tokens=100000)
    assert vllm.pump(10, lambda: vllm.rows("r"))
    process.send_signal(number)
    assert vllm.pump(10, lambda: vllm.finish("r") is not None)
    assert vllm.finish("r") == 2
    assert process.wait(10) == 0 and vllm.dead == 0


def test_interrupted_while_waiting_for_a_gateway(vllm):
    vllm.handshake.unbind(f"tcp://127.0.0.1:{vllm.port}")
    process = vllm.start(0, wait=False)
    vllm.pump(1, lambda: "engine_dialling" in vllm.log(0))
    process.send_signal(signal.SIGINT)
    assert process.wait(10) == 130


def test_gives_up_when_no_gateway_answers(vllm):
    vllm.handshake.unbind(f"tcp://127.0.0.1:{vllm.port}")
    process = vllm.start(0, "--handshake-timeout", "0.5", wait=False)
    assert process.wait(15) == 1
    assert "no gateway answered" in vllm.log(0)


def test_bad_flags_exit_2_and_name_the_flag(vllm):
    for args, naming in ((["--block-size", "0"], "--block-size"), (["--wire", "morse"], "--wire"), (["--max-num-seqs", "-3"], "--max-num-seqs"),
                         (["--data-parallel-size", "2", "--data-parallel-rank", "2"], "--data-parallel-rank"), (["--nonsense"], "--nonsense"),
                         (["--sim-last-token", "60000"], "--sim-last-token")):
        process = vllm.start(0, *args, wait=False)
        assert process.wait(15) == 2, args
        assert naming in vllm.log(0)
    assert vllm.start(0, model="/nonexistent.gguf", runner="llama", wait=False).wait(15) == 2


def test_two_ranks_of_one_group(vllm):
    vllm.start(0, "--data-parallel-size", "2")
    vllm.start(1, "--data-parallel-size", "2")
    for n in range(20):
        vllm.add(f"r{n}", rank=n % 2)
    assert vllm.pump(10, lambda: all(vllm.finish(f"r{n}") is not None for n in range(20)))
    assert {m[0] for _, m in vllm.messages} == {0, 1}
    assert vllm.facts[1]["data_parallel_rank"] == 1
    vllm.processes[1].kill()
    assert len(vllm.run("still", rank=0)) == 4
    vllm.start(1, "--data-parallel-size", "2")
    assert len(vllm.run("back", rank=1)) == 4


def test_a_thousand_requests_come_out_exact_and_leave_nothing(vllm):
    vllm.start(0, "--max-num-seqs", "64")
    for n in range(1000):
        vllm.add(f"r{n}", prompt=(n % 1000 + 1, 2, 3), max_tokens=1 + n % 20)
    assert vllm.pump(60, lambda: sum(1 for _, m in vllm.messages for o in m[1] if o[5] is not None) == 1000)
    done = {o[0]: 0 for _, m in vllm.messages for o in m[1]}
    for _, m in vllm.messages:
        for o in m[1]:
            done[o[0]] += len(o[1])
    assert all(done[f"r{n}"] == 1 + n % 20 for n in range(1000))
    stats = vllm.utility("rankgate_stats")
    assert (stats["num_running"], stats["num_waiting"], stats["kv_active_pages"], stats["finished"]) == (0, 0, 0, 1000)


def test_the_load_page_tells_the_same_without_a_message(vllm):
    vllm.start(0, "--sim-step-us", "50000")
    path = vllm.facts[0]["rankgate_load_mailbox"]
    read = lambda: struct.unpack("<8s11Q", open(path, "rb").read(96))  # noqa: E731
    magic, version, _, pid, sequence, *_ = read()
    assert magic == b"RGLOAD1\0" and version == 1 and pid == vllm.processes[0].pid and sequence % 2 == 0
    vllm.add("a", max_tokens=1000)
    vllm.add("b", max_tokens=1000)
    assert vllm.pump(5, lambda: read()[5] == 2)
    assert read()[7] > 0
    vllm.send(ABORT, pack(["a", "b"]))
    assert vllm.pump(5, lambda: read()[5:8] == (0, 0, 0))

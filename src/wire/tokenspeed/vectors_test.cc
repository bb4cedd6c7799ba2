// SPDX-License-Identifier: Apache-2.0
// Every vector from the real TokenSpeed codec, its event loop, and the public gateway in front of it:
// byte-equal in the direction that we write, field-equal in the direction that we read, refused where the
// real decoder refuses.
#include <gtest/gtest.h>

#include <boost/json.hpp>
#include <cmath>
#include <set>

#include "wire/test_vectors.h"
#include "wire/tokenspeed/outputs.h"
#include "wire/tokenspeed/request.h"
#include "wire/tokenspeed/validate.h"

namespace rankgate::wire::tokenspeed {
namespace {

namespace json = boost::json;
using test::LoadVectors;
using test::SameJson;
using test::ToHex;
using test::Vector;

json::value Number(double value) {
    if (std::isnan(value)) {
        return "nan";
    }
    if (std::isinf(value)) {
        return value > 0 ? "inf" : "-inf";
    }
    return value;
}

template <class T>
json::array List(const std::vector<T>& values) {
    json::array out;
    for (const T& value : values) {
        out.emplace_back(value);
    }
    return out;
}

/// The sampling parameters that are not the default, as the vectors list them.
json::object NonDefault(const SamplingFields& fields) {
    const SamplingFields defaults;
    json::object out;
    const auto number = [&out](const char* name, double value, double standard) {
        if (!(value == standard)) {
            out[name] = Number(value);
        }
    };
    const auto integer = [&out](const char* name, std::int64_t value, std::int64_t standard) {
        if (value != standard) {
            out[name] = value;
        }
    };
    const auto flag = [&out](const char* name, bool value, bool standard) {
        if (value != standard) {
            out[name] = value;
        }
    };
    const auto optional = [&out](const char* name, const auto& value) {
        if (value) {
            out[name] = json::value_from(*value);
        }
    };
    optional("max_new_tokens", fields.max_new_tokens);
    if (fields.stop) {
        // A lone string stays a string in the real struct.
        out["stop"] = List(*fields.stop);
    }
    if (fields.stop_token_ids) {
        const std::set<std::int64_t> unique{fields.stop_token_ids->begin(), fields.stop_token_ids->end()};
        out["stop_token_ids"] = List(std::vector<std::int64_t>{unique.begin(), unique.end()});
    }
    number("temperature", fields.temperature, defaults.temperature);
    number("top_p", fields.top_p, defaults.top_p);
    integer("top_k", fields.top_k, defaults.top_k);
    number("min_p", fields.min_p, defaults.min_p);
    number("frequency_penalty", fields.frequency_penalty, defaults.frequency_penalty);
    number("presence_penalty", fields.presence_penalty, defaults.presence_penalty);
    number("repetition_penalty", fields.repetition_penalty, defaults.repetition_penalty);
    integer("min_new_tokens", fields.min_new_tokens, 0);
    optional("json_schema", fields.json_schema);
    optional("regex", fields.regex);
    optional("ebnf", fields.ebnf);
    optional("structural_tag", fields.structural_tag);
    flag("ignore_eos", fields.ignore_eos, false);
    flag("skip_special_tokens", fields.skip_special_tokens, true);
    flag("spaces_between_special_tokens", fields.spaces_between_special_tokens, true);
    flag("no_stop_trim", fields.no_stop_trim, false);
    optional("thinking_budget", fields.thinking_budget);
    optional("stream_interval", fields.stream_interval);
    if (fields.logit_bias) {
        json::object bias;
        for (const auto& [token, value] : *fields.logit_bias) {
            bias[token] = value;
        }
        out["logit_bias"] = bias;
    }
    if (fields.seed) {
        out["seed"] = fields.negative_seed ? json::value(static_cast<std::int64_t>(*fields.seed))
                                           : json::value(*fields.seed);
    }
    optional("logprobs", fields.logprobs);
    integer("n", fields.n, 1);
    if (fields.stop_strs) {
        out["stop_strs"] = List(*fields.stop_strs);
    }
    integer("stop_str_max_len", fields.stop_str_max_len, 0);
    flag("is_normalized", fields.is_normalized, false);
    return out;
}

/// The vector's request fields, without those that the text path does not keep.
void Compare(const Request& request, const json::object& fields, const std::string& name) {
    EXPECT_EQ(request.rid, fields.contains("rid") ? std::string{fields.at("rid").as_string()} : "") << name;
    if (fields.contains("input_ids")) {
        ASSERT_TRUE(request.input_ids.has_value()) << name;
        EXPECT_EQ(List(*request.input_ids), fields.at("input_ids").as_array()) << name;
    } else {
        EXPECT_FALSE(request.input_ids.has_value()) << name;
    }
    json::object expected = fields.at("sampling_params").as_object();
    expected.erase("custom_params");
    if (expected.contains("stop") && expected.at("stop").is_string()) {
        expected["stop"] = json::array{expected.at("stop")};
    }
    const json::object ours = NonDefault(request.sampling);
    EXPECT_TRUE(SameJson(ours, expected))
        << name << "\n ours " << json::serialize(ours) << "\n real " << json::serialize(expected);
    const auto flag = [&fields](const char* key) { return fields.contains(key) && fields.at(key).as_bool(); };
    EXPECT_EQ(request.return_logprob, flag("return_logprob")) << name;
    EXPECT_EQ(request.stream, flag("stream")) << name;
    const auto integer = [&fields](const char* key, std::int64_t standard) {
        return fields.contains(key) ? fields.at(key).to_number<std::int64_t>() : standard;
    };
    const std::int64_t start = integer("logprob_start_len", -1);
    // The real engine resolves -1 to the last prompt position while it validates.
    const auto last = static_cast<std::int64_t>(request.input_ids ? request.input_ids->size() : 0) - 1;
    EXPECT_TRUE(request.logprob_start_len == start || (request.logprob_start_len == -1 && start == last))
        << name;
    EXPECT_EQ(request.top_logprobs_num, integer("top_logprobs_num", 0)) << name;
    EXPECT_EQ(request.has_session, fields.contains("session_params")) << name;
    EXPECT_EQ(request.has_multimodal, fields.contains("multimodal_inputs") || fields.contains("input_embeds"))
        << name;
    if (fields.contains("created_time")) {
        EXPECT_EQ(request.created_time, fields.at("created_time").to_number<double>()) << name;
    }
}

TEST(TokenSpeedVectors, RequestsDecodeNormaliseAndValidateLikeTheRealOnes) {
    // Accepted by the real decoder, and then fatal to the engine or meaningless to it: answered with an abort
    // row here.
    const std::set<std::string> refused_here{"empty_ids",
                                             "nil_ids",
                                             "ids_over_int32",
                                             "ids_negative",
                                             "embeds",
                                             "session",
                                             "session_short",
                                             "raw_stream_interval_0",
                                             "raw_nan_temperature",
                                             "raw_inf_temperature",
                                             "inline_feature",
                                             "aux_feature",
                                             "limit_255",
                                             "limit_256",
                                             "bfloat16",
                                             "two_items",
                                             "empty_tensor"};
    int accepted = 0;
    int rows = 0;
    int dropped = 0;
    for (const char* file : {"request_add", "request_sampling", "request_rejected", "tensor"}) {
        for (const Vector& vector : LoadVectors(std::string{"tokenspeed/"} + file)) {
            if (vector.frames.empty()) {
                continue;
            }
            const std::string name = std::string{file} + " " + vector.name;
            if (vector.name == "aux_missing") {
                continue;  // multimodal: refused before any tensor is looked for
            }
            const std::optional<RequestType> type = ParseTypeFrame(vector.frames[0]);
            if (vector.outcome == "drop" && (!type || vector.frames.size() < 2)) {
                ++dropped;  // unknown type frames, and one that came alone
                continue;
            }
            ASSERT_EQ(type, RequestType::kAdd) << name;
            DecodedRequest decoded;
            DecodeRequest(vector.frames[1], decoded);
            if (vector.outcome == "drop") {
                EXPECT_FALSE(decoded.status.ok()) << name;
                ++dropped;
                continue;
            }
            ASSERT_TRUE(decoded.status.ok()) << name << ": " << decoded.status.error().message;
            Normalise(decoded.request);
            Compare(decoded.request, vector.fields.as_object(), name);
            RankLimits limits;
            limits.vocab_size = vector.name.find("bias") != std::string::npos ? 512 : 0;
            limits.output_logprobs = vector.name != "logprob_off_server";
            const Status checked = CheckDecoded(decoded.request, limits);
            const bool sound = vector.outcome == "accept" && !refused_here.contains(vector.name);
            EXPECT_EQ(checked.ok(), sound) << name << (checked.ok() ? "" : ": " + checked.error().message);
            sound ? ++accepted : ++rows;
        }
    }
    EXPECT_EQ(dropped, 37);
    EXPECT_GE(accepted, 55);
    EXPECT_GE(rows, 40);
}

TEST(TokenSpeedVectors, ARequestThatIsDroppedUpstreamIsStillAnswerableWhereItsIdCouldBeRead) {
    for (const Vector& vector : LoadVectors("tokenspeed/request_rejected")) {
        if (vector.frames.size() < 2 || vector.frames[0] != TypeFrame(RequestType::kAdd)) {
            continue;
        }
        DecodedRequest decoded;
        DecodeRequest(vector.frames[1], decoded);
        const bool behind_the_id = vector.name.rfind("ids_", 0) == 0 ||
                                   vector.name.rfind("params_", 0) == 0 ||
                                   vector.name.rfind("stream_", 0) == 0 || vector.name == "trailing_byte";
        if (behind_the_id) {
            EXPECT_TRUE(decoded.has_rid) << vector.name;
            EXPECT_EQ(decoded.request.rid, "req-1") << vector.name;
            EXPECT_FALSE(decoded.status.error().message.empty());
        }
    }
}

TEST(TokenSpeedVectors, TheTextFormIsWrittenByteForByte) {
    for (const Vector& vector : LoadVectors("tokenspeed/request_add")) {
        if (vector.name == "text_prefix_11") {
            DecodedRequest decoded;
            DecodeRequest(vector.frames[1], decoded);
            std::string again;
            EncodeAdd(ToGenerateRequest(std::move(decoded.request)), again);
            EXPECT_EQ(ToHex(again), ToHex(vector.frames[1]));
            return;
        }
    }
    FAIL() << "no text_prefix_11";
}

TEST(TokenSpeedVectors, RequestsOfThePublicGatewayAreWrittenByteForByte) {
    int adds = 0;
    int same = 0;
    int aborts = 0;
    for (const Vector& vector : LoadVectors("tokenspeed/smg_frontend")) {
        if (vector.direction != "frontend->engine" || vector.socket != "input" || vector.frames.empty()) {
            continue;
        }
        const std::size_t type_at = vector.frames.size() - 2;
        const std::string& payload = vector.frames.back();
        std::string again;
        if (vector.frames[type_at] == TypeFrame(RequestType::kAbort)) {
            std::vector<std::string_view> ids;
            ASSERT_TRUE(DecodeAbort(payload, ids).ok()) << vector.name;
            EncodeAbort(ids, again);
            EXPECT_EQ(ToHex(again), ToHex(payload)) << vector.name;
            ++aborts;
            continue;
        }
        ++adds;
        DecodedRequest decoded;
        DecodeRequest(payload, decoded);
        ASSERT_TRUE(decoded.status.ok()) << vector.name;
        const SamplingFields& fields = decoded.request.sampling;
        EXPECT_TRUE(fields.is_normalized) << vector.name;
        // Ours differs by design in three points: every step is streamed, max_new_tokens is always finite,
        // and greedy pins seed 0.
        const bool comparable = fields.max_new_tokens && fields.top_k != 1 && *fields.max_new_tokens > 0 &&
                                vector.name != "top_k_200";  // answered with an abort row: never sent
        std::string expected = payload;
        ASSERT_TRUE(expected.back() == '\xc2' || expected.back() == '\xc3') << vector.name;
        expected.back() = '\xc3';
        EncodeAdd(ToGenerateRequest(std::move(decoded.request)), again);
        if (comparable) {
            EXPECT_EQ(ToHex(again), ToHex(expected)) << vector.name;
            ++same;
        }
    }
    EXPECT_GE(adds, 20);
    EXPECT_GE(same, 18);
    EXPECT_EQ(aborts, 2);
}

TEST(TokenSpeedVectors, AbortsDecodeAndEncodeToTheSameBytes) {
    for (const Vector& vector : LoadVectors("tokenspeed/abort")) {
        ASSERT_EQ(ParseTypeFrame(vector.frames[0]), RequestType::kAbort);
        std::vector<std::string_view> ids;
        const Status status = DecodeAbort(vector.frames[1], ids);
        EXPECT_EQ(status.ok(), vector.outcome == "accept") << vector.name;
        if (status.ok()) {
            std::string again;
            EncodeAbort(ids, again);
            EXPECT_EQ(ToHex(again), ToHex(vector.frames[1])) << vector.name;
            if (vector.fields.as_object().contains("rids")) {
                EXPECT_EQ(ids.size(), vector.fields.at("rids").as_array().size());
            }
        } else {
            EXPECT_TRUE(ids.empty());
        }
    }
}

TEST(TokenSpeedVectors, ControlInputsInAnAddFrameAreRefused) {
    int seen = 0;
    for (const Vector& vector : LoadVectors("tokenspeed/control")) {
        if (vector.direction == "frontend->engine" && vector.frames.size() == 2) {
            DecodedRequest decoded;
            DecodeRequest(vector.frames[1], decoded);
            EXPECT_FALSE(decoded.status.ok()) << vector.name;
            ++seen;
        }
    }
    EXPECT_EQ(seen, 3);
}

FinishReason Reason(std::string_view word) {
    return word.empty()       ? FinishReason::kNone
           : word == "stop"   ? FinishReason::kStop
           : word == "length" ? FinishReason::kLength
           : word == "abort"  ? FinishReason::kAbort
                              : FinishReason::kError;
}

/// `columns` = the eight columns and the tail, in wire order.
void CompareOutputs(const OutputsMessage& message, const json::array& columns, const std::string& name) {
    ASSERT_EQ(message.rows.size(), columns.at(0).as_array().size()) << name;
    for (std::size_t i = 0; i < message.rows.size(); ++i) {
        const OutputRow& row = message.rows[i];
        EXPECT_EQ(row.request_id, columns.at(0).at(i).as_string()) << name;
        const auto tokens = message.TokensOf(row);
        EXPECT_EQ(List(std::vector<std::int64_t>(tokens.begin(), tokens.end())),
                  columns.at(1).at(i).as_array())
            << name;
        EXPECT_EQ(row.finish_reason, Reason(columns.at(2).at(i).as_string())) << name;
        EXPECT_EQ(row.num_prompt_tokens, columns.at(3).at(i).to_number<std::int64_t>()) << name;
        EXPECT_EQ(row.completion_tokens, columns.at(4).at(i).to_number<std::int64_t>()) << name;
        EXPECT_EQ(row.num_cached_tokens, columns.at(5).at(i).to_number<std::int64_t>()) << name;
        Logprobs logprobs;
        const Status status = DecodeLogprobs(row, logprobs);
        ASSERT_TRUE(status.ok()) << name << status.error().message;
        const json::array& values = columns.at(6).at(i).as_array();
        ASSERT_EQ(logprobs.logprobs.size(), values.size()) << name;
        for (std::size_t k = 0; k < values.size(); ++k) {
            if (values[k].is_number()) {
                EXPECT_EQ(logprobs.logprobs[k], static_cast<float>(values[k].to_number<double>())) << name;
            } else {
                EXPECT_EQ(Number(static_cast<double>(logprobs.logprobs[k])), values[k]) << name;
            }
            EXPECT_EQ(logprobs.token_ids[k], columns.at(7).at(i).at(k).to_number<std::int64_t>()) << name;
        }
    }
    const auto tail = [&columns](std::size_t index) {
        return index < columns.size() ? columns[index].to_number<std::int64_t>() : 0;
    };
    EXPECT_EQ(message.engine_index, tail(8)) << name;
    EXPECT_EQ(message.load.num_running, tail(9)) << name;
    EXPECT_EQ(message.load.num_waiting, tail(10)) << name;
    EXPECT_EQ(message.load.kv_active_pages, tail(11)) << name;
    EXPECT_EQ(message.load.kv_total_pages, tail(12)) << name;
}

/// Encodes what was decoded.
std::string Again(const OutputsMessage& message) {
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
            EXPECT_TRUE(DecodeLogprobs(row, output.logprobs.emplace()).ok());
        }
    }
    OutputsBatch batch;
    batch.engine_index = message.engine_index;
    batch.outputs = outputs;
    batch.load = message.load;
    std::string payload;
    EncodeOutputs(batch, payload);
    return payload;
}

json::array Columns(const json::object& fields) {
    json::array columns;
    for (const char* key :
         {"rids", "output_ids", "finished_reasons", "prompt_tokens", "completion_tokens", "cached_tokens",
          "output_token_logprobs_val", "output_token_logprobs_idx", "engine_index", "num_running",
          "num_waiting", "kv_active_pages", "kv_total_pages"}) {
        columns.push_back(fields.at(key));
    }
    return columns;
}

TEST(TokenSpeedVectors, OutputsDecodeLikeTheRealOnesAndEncodeToTheSameBytes) {
    OutputsMessage message;
    int accepted = 0;
    int rejected = 0;
    int same = 0;
    for (const Vector& vector : LoadVectors("tokenspeed/output")) {
        if (vector.frames.empty()) {
            continue;  // what the engine refuses to send at all
        }
        const std::vector<std::string_view> frames = vector.From(0);
        if (vector.name == "engine_core_dead") {
            EXPECT_TRUE(IsEngineCoreDead(frames));
            EXPECT_FALSE(DecodeOutputs(frames, message).ok());
            continue;
        }
        const Status status = DecodeOutputs(frames, message);
        // The real decoder lets columns of different lengths pass; nobody can use them.
        const bool unusable = vector.name == "rids_nil" || vector.name.rfind("ragged", 0) == 0;
        ASSERT_EQ(status.ok(), vector.outcome == "accept" && !unusable)
            << vector.name << (status.ok() ? "" : ": " + status.error().message);
        if (!status.ok()) {
            ++rejected;
            EXPECT_TRUE(message.rows.empty()) << vector.name;
            continue;
        }
        ++accepted;
        CompareOutputs(message, Columns(vector.fields.as_object()), vector.name);
        const bool fourteen = frames[0][0] == '\x9e';
        const bool ours = fourteen && vector.name != "load_negative" &&
                          vector.name.rfind("reason_text", 0) != 0 && vector.name != "logprob_int_value";
        if (ours) {
            EXPECT_EQ(ToHex(Again(message)), ToHex(frames[0])) << vector.name;
            ++same;
        }
    }
    EXPECT_GE(accepted, 35);
    EXPECT_GE(rejected, 25);
    EXPECT_GE(same, 20);
}

TEST(TokenSpeedVectors, TheRealEventLoopsBatchesDecodeAndEncodeToTheSameBytes) {
    OutputsMessage message;
    int batches = 0;
    int requests = 0;
    for (const Vector& vector : LoadVectors("tokenspeed/live_loop")) {
        if (vector.frames.empty()) {
            continue;
        }
        if (vector.direction == "engine->frontend") {
            const std::vector<std::string_view> frames = vector.From(0);
            if (IsEngineCoreDead(frames)) {
                continue;
            }
            const Status status = DecodeOutputs(frames, message);
            ASSERT_TRUE(status.ok()) << vector.name << status.error().message;
            json::array columns = vector.fields.as_array();
            columns.erase(columns.begin());
            CompareOutputs(message, columns, vector.name);
            EXPECT_EQ(ToHex(Again(message)), ToHex(frames[0])) << vector.name;
            ++batches;
        } else if (vector.frames.size() >= 2 && vector.frames[0] == TypeFrame(RequestType::kAdd)) {
            DecodedRequest decoded;
            DecodeRequest(vector.frames[1], decoded);
            requests += decoded.status.ok() ? 1 : 0;
        }
    }
    EXPECT_GE(batches, 60);
    EXPECT_GE(requests, 30);
}

TEST(TokenSpeedVectors, BatchesThatThePublicGatewayTakesAreTaken) {
    const std::set<std::string> refused{
        "batch_trailing_byte_then_good/0", "batch_ragged_then_good/0",   "batch_short_8_then_good/0",
        "batch_wrong_tag_then_good/0",     "batch_nil_rids_then_good/0", "batch_token_negative_then_good/0",
        "batch_two_bad_then_good/0",       "batch_two_bad_then_good/1",  "batch_three_bad_then_good/0",
        "batch_three_bad_then_good/1",     "batch_three_bad_then_good/2"};
    OutputsMessage message;
    int batches = 0;
    for (const Vector& vector : LoadVectors("tokenspeed/smg_accepts")) {
        if (vector.name.rfind("batch", 0) != 0) {
            continue;
        }
        ++batches;
        const std::vector<std::string_view> frames = vector.From(0);
        const Status status = DecodeOutputs(frames, message);
        EXPECT_EQ(status.ok(), !refused.contains(vector.name))
            << vector.name << (status.ok() ? "" : ": " + status.error().message);
        if (vector.name == "batch_negative_load_then_good/0") {
            EXPECT_FALSE(message.has_load());  // read without loss, and no snapshot
        }
    }
    EXPECT_GE(batches, 40);
}

}  // namespace
}  // namespace rankgate::wire::tokenspeed

// SPDX-License-Identifier: Apache-2.0
// TokenSpeed requests, frontend -> engine, both directions: ADD (TokenizedGenerateReqInput, 11 elements out,
// 6 and more in) and ABORT; this wire has nothing else (no waves, no utility calls). The gateway encodes
// normalised sampling parameters; the engine end takes raw and normalised ones, does what the real engine's
// decoder does to them, and turns the result into the neutral request. Layout as seen on tokenspeed 0.1.1.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/result.h"
#include "wire/generate.h"
#include "wire/protocol.h"

namespace rankgate::wire::tokenspeed {

enum class RequestType : std::uint8_t { kAdd = 0, kAbort = 1 };
std::string_view TypeFrame(RequestType type) noexcept;
std::optional<RequestType> ParseTypeFrame(std::string_view frame) noexcept;

/// top_k for "all", exactly; other values from 128 up are refused by the engine.
inline constexpr std::int64_t kTopKAll = std::int64_t{1} << 30;
inline constexpr std::int64_t kTopKLimit = 128;

/// The 29 positions of SamplingParams, with the engine's defaults.
struct SamplingFields {
    std::optional<std::int64_t> max_new_tokens;
    std::optional<std::vector<std::string>> stop;
    std::optional<std::vector<std::int64_t>> stop_token_ids;
    double temperature{1.0};
    double top_p{1.0};
    std::int64_t top_k{-1};
    double min_p{0.0};
    double frequency_penalty{0.0};
    double presence_penalty{0.0};
    double repetition_penalty{1.0};
    std::int64_t min_new_tokens{0};
    std::optional<std::string> json_schema;
    std::optional<std::string> regex;
    std::optional<std::string> ebnf;
    std::optional<std::string> structural_tag;
    bool ignore_eos{false};
    bool skip_special_tokens{true};
    bool spaces_between_special_tokens{true};
    bool no_stop_trim{false};
    std::optional<std::int64_t> thinking_budget;
    std::optional<std::int64_t> stream_interval;
    std::optional<std::vector<std::pair<std::string, double>>> logit_bias;
    std::optional<std::uint64_t> seed;
    bool negative_seed{false};  // `seed` holds the two's complement then
    std::optional<std::int64_t> logprobs;
    std::int64_t n{1};
    std::optional<std::vector<std::string>> stop_strs;
    std::int64_t stop_str_max_len{0};
    bool is_normalized{false};
};

/// An ADD as it stands on the wire; 25 known elements, of which the text path uses these.
struct Request {
    std::string rid;
    std::optional<std::vector<std::int64_t>> input_ids;
    SamplingFields sampling;
    bool return_logprob{false};
    std::int64_t logprob_start_len{-1};
    std::int64_t top_logprobs_num{0};
    std::optional<std::vector<std::int64_t>> token_ids_logprob;
    bool stream{false};
    bool has_session{false};     // session_params with an id
    bool has_multimodal{false};  // multimodal_inputs or input_embeds
    double created_time{0.0};
    std::optional<std::string> validation_error;
};

/// Appends the 11-element text form with normalised parameters (greedy as temperature 1, top_k 1, seed 0).
/// The request must have passed CheckRequest (validate.h).
void EncodeAdd(const GenerateRequest& request, std::string& out);

/// The codec alone: types as strict as the real one's, any length from 6 up. On failure the rid may still
/// have been read
/// (`out.rid`, has_rid), so that the engine end can answer an abort row where the real engine stays silent.
struct DecodedRequest {
    Request request;
    Status status;
    bool has_rid{false};
};
void DecodeRequest(std::string_view payload, DecodedRequest& out);

/// What the real engine does after decoding: raw parameters are normalised, a missing seed becomes
/// crc32(rid), stop strings are counted. Idempotent.
void Normalise(Request& request);

/// The neutral request. Only for requests that passed CheckDecoded (validate.h). EOS ids are the engine's own
/// on this wire: unless ignore_eos is set the caller adds those of its model.
GenerateRequest ToGenerateRequest(Request&& request);

void EncodeAbort(std::span<const std::string_view> request_ids, std::string& out);
void EncodeAbort(std::string_view request_id, std::string& out);
/// Strict as the real one: anything but a list of strings is an error. Views into `payload`.
Status DecodeAbort(std::string_view payload, std::vector<std::string_view>& request_ids);

/// zlib's CRC-32 of the id: the seed of a request that names none.
std::uint32_t SeedOf(std::string_view rid) noexcept;

}  // namespace rankgate::wire::tokenspeed

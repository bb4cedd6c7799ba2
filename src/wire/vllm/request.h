// SPDX-License-Identifier: Apache-2.0
// vLLM requests, frontend -> engine, both directions: ADD, ABORT, START_DP_WAVE, UTILITY. The gateway's group
// encodes, the engine end decodes. Encoders append to a reusable buffer; decoders never throw, and DecodeAdd
// never loses a request id that could be read, so that a bad request is answered instead of deafening the
// engine. Layout as seen on vLLM 0.26 to 0.32.0.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "wire/generate.h"
#include "wire/msgpack.h"
#include "wire/protocol.h"

namespace rankgate::wire::vllm {

/// The raw one-byte frame in front of the payload. Other bytes are engine-internal or unknown: never sent.
enum class RequestType : std::uint8_t { kAdd = 0, kAbort = 1, kStartDpWave = 2, kUtility = 3 };
/// The frame's bytes; static storage.
std::string_view TypeFrame(RequestType type) noexcept;
/// Empty for an empty, longer or unknown frame.
std::optional<RequestType> ParseTypeFrame(std::string_view frame) noexcept;

/// Elements that we send; engines since 0.26 take any length from 9 up.
inline constexpr std::size_t kAddElements = 21;
inline constexpr std::size_t kMinAddElements = 9;

/// Appends the payload of an ADD. The request must have passed CheckRequest (validate.h): this writes what it
/// is given.
void EncodeAdd(const GenerateRequest& request, std::string& out);

/// What DecodeAdd made of a frame. With `status` not ok, `request.id` and `request.client_index` still hold
/// whatever could be read (has_id says whether the id could), so that an answer with finish_reason error
/// reaches the right client.
struct DecodedAdd {
    GenerateRequest request;
    Status status;
    bool has_id{false};
};
/// Strict in types as the real engine is (int where float is due is fine, nothing else), but every failure
/// names its field
/// ("sampling_params.temperature"). Multimodal, embeds and pooling requests are refused by name. Shorter (>=
/// 9) and longer arrays, and unknown sampling keys, are fine. Ranges of values are not its business: see
/// CheckRequest.
void DecodeAdd(std::string_view payload, DecodedAdd& out);

void EncodeAbort(std::span<const std::string_view> request_ids, std::string& out);
void EncodeAbort(std::string_view request_id, std::string& out);
/// Fills views into `payload`; elements that are not strings are passed over, as the real engine does.
Status DecodeAbort(std::string_view payload, std::vector<std::string_view>& request_ids);

struct StartDpWave {
    std::int64_t wave{0};
    /// Rank that shall not be woken; unset = all. Python frontends send the two-byte identity, which excludes
    /// nobody.
    std::optional<std::int64_t> exclude;
};
void EncodeStartDpWave(const StartDpWave& start, std::string& out);
Result<StartDpWave> DecodeStartDpWave(std::string_view payload);

/// Begins a UTILITY call: the caller appends exactly `num_args` values with the Writer (a LoRA request by
/// WriteLora).
void BeginUtility(Writer& writer, std::int32_t client_index, std::uint64_t call_id, std::string_view method,
                  std::size_t num_args);
void WriteLora(Writer& writer, const LoraRequest& lora);

/// A call as the engine end sees it. With `status` not ok, `answerable` says whether client_index and call_id
/// could be read, so that the caller gets a failure_message instead of silence.
struct UtilityCall {
    std::int32_t client_index{0};
    std::uint64_t call_id{0};
    std::string_view method;
    std::string_view args;  // raw msgpack array
    std::uint32_t num_args{0};
    Status status;
    bool answerable{false};
};
/// Views into `payload`.
UtilityCall DecodeUtility(std::string_view payload);
/// Reads one LoRA array (four to seven elements, old and new layouts).
Result<LoraRequest> ReadLora(Reader& reader);

}  // namespace rankgate::wire::vllm

// SPDX-License-Identifier: Apache-2.0
// Fuzzes every message decoder of both dialects: the first byte picks one, the rest is its frame (for
// logprobs: also the tensor frame). Beside "never crashes": what decodes can be encoded, and that decodes
// again.
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/check.h"
#include "wire/handshake.h"
#include "wire/kv_events.h"
#include "wire/tokenspeed/outputs.h"
#include "wire/tokenspeed/request.h"
#include "wire/tokenspeed/validate.h"
#include "wire/vllm/outputs.h"
#include "wire/vllm/request.h"
#include "wire/vllm/validate.h"

using namespace rankgate;        // NOLINT(google-build-using-namespace)
using namespace rankgate::wire;  // NOLINT(google-build-using-namespace)

namespace {

void FuzzHandshake(std::string_view bytes) {
    std::string out;
    if (const Result<Greeting> greeting = DecodeGreeting(bytes); greeting.ok()) {
        EncodeGreeting(*greeting, Dialect::kTokenSpeed, out);
        RG_CHECK(DecodeGreeting(out).ok());
    }
    if (const Result<InitMessage> init = DecodeInit(bytes); init.ok()) {
        out.clear();
        EncodeInit(*init, out);
        RG_CHECK(DecodeInit(out).ok());
    }
    if (const Result<ReadyResponse> ready = DecodeReadyResponse(bytes); ready.ok()) {
        out.clear();
        EncodeReadyResponse(*ready, ready->dialect, out);
        RG_CHECK(DecodeReadyResponse(out).ok());
    }
}

void FuzzVllmRequests(std::string_view bytes) {
    vllm::DecodedAdd add;
    vllm::DecodeAdd(bytes, add);
    if (add.status.ok()) {
        RG_CHECK(add.has_id);
        (void)vllm::CheckRequest(add.request, {4096, 32000});
        std::string out;
        vllm::EncodeAdd(add.request, out);
        vllm::DecodedAdd again;
        vllm::DecodeAdd(out, again);
        // An empty backend or greedy corner may be refused the second time; the id never gets lost.
        RG_CHECK(again.has_id && again.request.id == add.request.id);
    }
    std::vector<std::string_view> ids;
    (void)vllm::DecodeAbort(bytes, ids);
    (void)vllm::DecodeStartDpWave(bytes);
    (void)vllm::DecodeUtility(bytes);
    Reader reader{bytes};
    (void)vllm::ReadLora(reader);
}

void FuzzVllmOutputs(std::string_view bytes) {
    static vllm::OutputsMessage message;
    // The frame again as its own tensor, so that indices find something.
    const std::string_view frames[] = {bytes, bytes.substr(bytes.size() / 2)};
    if (!vllm::DecodeOutputs(frames, message).ok()) {
        RG_CHECK(message.rows.empty() && message.tokens.empty());
        return;
    }
    std::vector<RequestOutput> outputs;
    for (const OutputRow& row : message.rows) {
        RG_CHECK(std::size_t{row.first_token} + row.num_tokens <= message.tokens.size());
        RequestOutput& output = outputs.emplace_back();
        output.request_id = row.request_id;
        output.finish_reason = row.finish_reason;
        output.stop_reason = row.stop_reason();
        const auto tokens = message.TokensOf(row);
        output.new_token_ids.assign(tokens.begin(), tokens.end());
        Logprobs logprobs;
        for (const std::string_view raw : {row.logprobs, row.prompt_logprobs}) {
            if (vllm::DecodeLogprobs(raw, frames, logprobs).ok()) {
                RG_CHECK(logprobs.token_ids.size() == static_cast<std::size_t>(logprobs.positions) *
                                                          static_cast<std::size_t>(logprobs.width));
                RG_CHECK(logprobs.ranks.size() == static_cast<std::size_t>(logprobs.positions));
                output.logprobs = logprobs;
            }
        }
    }
    vllm::OutputsBatch batch;
    batch.engine_index = message.engine_index;
    batch.outputs = outputs;
    batch.stats = message.has_stats ? &message.stats : nullptr;
    std::string payload;
    AuxFrames aux;
    vllm::EncodeOutputs(batch, payload, aux);
    std::vector<std::string_view> again{payload};
    for (std::size_t i = 0; i < aux.size(); ++i) {
        again.push_back(aux[i]);
    }
    vllm::OutputsMessage second;
    RG_CHECK(vllm::DecodeOutputs(again, second).ok());
    RG_CHECK(second.tokens == message.tokens);
}

void FuzzLogprobs(std::string_view bytes) {
    const std::size_t half = bytes.size() / 2;
    const std::string_view frames[] = {"", bytes.substr(half)};
    Logprobs logprobs;
    if (!vllm::DecodeLogprobs(bytes.substr(0, half), frames, logprobs).ok()) {
        RG_CHECK(logprobs.token_ids.empty() && logprobs.positions == 0);
    }
    OutputRow row;
    row.logprobs = bytes.substr(0, half);
    row.logprob_ids = bytes.substr(half);
    row.num_tokens = 2;
    (void)tokenspeed::DecodeLogprobs(row, logprobs);
}

void FuzzTokenSpeedRequests(std::string_view bytes) {
    tokenspeed::DecodedRequest decoded;
    tokenspeed::DecodeRequest(bytes, decoded);
    if (decoded.status.ok()) {
        RG_CHECK(decoded.has_rid);
        tokenspeed::Normalise(decoded.request);
        tokenspeed::RankLimits limits;
        limits.max_prompt_tokens = 1000;
        if (tokenspeed::CheckDecoded(decoded.request, limits).ok()) {
            const GenerateRequest request = tokenspeed::ToGenerateRequest(std::move(decoded.request));
            std::string out;
            tokenspeed::EncodeAdd(request, out);
            tokenspeed::DecodedRequest again;
            tokenspeed::DecodeRequest(out, again);
            RG_CHECK(again.status.ok() && again.request.rid == request.id);
        }
    }
    std::vector<std::string_view> ids;
    (void)tokenspeed::DecodeAbort(bytes, ids);
}

void FuzzTokenSpeedOutputs(std::string_view bytes) {
    static tokenspeed::OutputsMessage message;
    if (!tokenspeed::DecodeOutputs({&bytes, 1}, message).ok()) {
        RG_CHECK(message.rows.empty() && message.tokens.empty());
        return;
    }
    for (const OutputRow& row : message.rows) {
        RG_CHECK(std::size_t{row.first_token} + row.num_tokens <= message.tokens.size());
        Logprobs logprobs;
        (void)tokenspeed::DecodeLogprobs(row, logprobs);
    }
}

void FuzzKvEvents(std::string_view bytes) {
    static KvEventBatch batch;
    if (!DecodeKvEvents(bytes, batch).ok()) {
        RG_CHECK(batch.events.empty());
        return;
    }
    for (const KvEvent& event : batch.events) {
        RG_CHECK(std::size_t{event.first_hash} + event.num_hashes <= batch.hashes.size());
        RG_CHECK(std::size_t{event.first_token} + event.num_tokens <= batch.tokens.size());
    }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    if (size == 0) {
        return 0;
    }
    const std::string_view bytes{reinterpret_cast<const char*>(data) + 1, size - 1};
    switch (data[0] % 7) {
        case 0:
            FuzzHandshake(bytes);
            break;
        case 1:
            FuzzVllmRequests(bytes);
            break;
        case 2:
            FuzzVllmOutputs(bytes);
            break;
        case 3:
            FuzzLogprobs(bytes);
            break;
        case 4:
            FuzzTokenSpeedRequests(bytes);
            break;
        case 5:
            FuzzTokenSpeedOutputs(bytes);
            break;
        default:
            FuzzKvEvents(bytes);
            break;
    }
    return 0;
}

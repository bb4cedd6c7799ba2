// SPDX-License-Identifier: Apache-2.0
// TokenSpeed outputs (BatchTokenIDOutSlim), engine -> frontend, both directions. Eight columns of equal
// length, then batch-level scalars that were appended over time: 9, 10 and 14 elements exist, longer ones are
// skipped. Integers are signed here although the public Rust gateway takes them unsigned: a -1 is read as it
// is, and never written. Ragged columns refuse the batch.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "wire/generate.h"
#include "wire/protocol.h"

namespace rankgate::wire::tokenspeed {

inline constexpr std::size_t kMaxRowsPerMessage = 1 << 16;

/// One decoded batch. Reuse the same object. There is no wave and no utility field on this wire, by
/// construction.
struct OutputsMessage {
    /// The sender's rank; 0 where the batch names none (right only for a group of one).
    std::int32_t engine_index{0};
    bool names_rank{false};
    std::vector<OutputRow> rows;
    std::vector<TokenId> tokens;
    /// kv_total_pages 0 = no snapshot in this batch.
    LoadSnapshot load;

    bool has_load() const noexcept { return load.kv_total_pages > 0; }
    std::span<const TokenId> TokensOf(const OutputRow& row) const noexcept {
        return {tokens.data() + row.first_token, row.num_tokens};
    }
    void Clear() noexcept;
};

/// The death notice is the caller's to test first. On failure `out` holds nothing; surplus frames are
/// ignored.
Status DecodeOutputs(Frames frames, OutputsMessage& out);

/// One scored position per new token, width 1 (this wire has no top-k), ranks unknown (0).
Status DecodeLogprobs(const OutputRow& row, Logprobs& out);

/// The stop token ids that vLLM names in stop_reason when one ends a request: all but the EOS.
std::vector<TokenId> NamedStops(const SamplingParams& params);
/// Which of them ended the row, as vLLM would say it: the matched id is the last of the delta here as there,
/// but this wire does not name it. monostate for EOS, for a stop string, and for every other end.
StopReason MatchedStop(FinishReason reason, std::span<const TokenId> delta,
                       std::span<const TokenId> named) noexcept;

// ---- engine end ----

struct OutputsBatch {
    std::int32_t engine_index{0};
    /// num_prompt_tokens, completion_tokens and num_cached_tokens are due in every row here; unset ones go
    /// out as 0.
    std::span<const RequestOutput> outputs;  // may be empty: a load-only batch
    LoadSnapshot load;
};
/// Appends the 14-element form.
void EncodeOutputs(const OutputsBatch& batch, std::string& payload);

}  // namespace rankgate::wire::tokenspeed

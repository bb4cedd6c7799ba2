// SPDX-License-Identifier: Apache-2.0
// vLLM's KV-cache event stream (PUB socket of each rank) and its replay: frames -> events. Accepts both
// shapes of batch (array, map) and both of events (tagged array up to 0.23, map with "type" since). Flat
// storage: hashes and tokens of all events in two vectors, so a decoder object is reused without allocating.
// Values, no thread rule.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "wire/generate.h"
#include "wire/protocol.h"

namespace rankgate::wire {

struct KvEvent {
    enum class Kind : std::uint8_t { kBlockStored, kBlockRemoved, kAllBlocksCleared, kUnknown };
    Kind kind{Kind::kUnknown};
    bool has_parent{false};
    std::uint32_t first_hash{0};
    std::uint32_t num_hashes{0};
    std::uint32_t first_token{0};
    std::uint32_t num_tokens{0};
    std::int64_t block_size{0};
    std::int64_t group_idx{0};
    std::uint64_t parent_hash{0};
    std::string_view medium;              // "GPU", "CPU"; empty = not said
    std::string_view lora_name;           // empty = base model
    std::string_view extra_keys;          // raw msgpack, one entry a block; empty = none
    std::string_view kv_cache_spec_kind;  // "full_attention", ...; empty = not said
};

/// Block hashes are handles: integers as they are, digests by their last eight bytes (big-endian), which is
/// the same number.
struct KvEventBatch {
    double timestamp{0.0};
    std::int64_t data_parallel_rank{-1};  // < 0 = not said
    std::vector<KvEvent> events;
    std::vector<std::uint64_t> hashes;
    std::vector<TokenId> tokens;

    std::span<const std::uint64_t> HashesOf(const KvEvent& event) const noexcept {
        return {hashes.data() + event.first_hash, event.num_hashes};
    }
    std::span<const TokenId> TokensOf(const KvEvent& event) const noexcept {
        return {tokens.data() + event.first_token, event.num_tokens};
    }
    void Clear() noexcept;
};
/// An event that cannot be understood becomes kUnknown (the caller schedules a replay); broken bytes fail the
/// batch.
Status DecodeKvEvents(std::string_view payload, KvEventBatch& out);

/// Live ([topic][seq][payload]) and replayed messages ([""][topic][seq][payload], older ones without topic),
/// read from the tail.
struct KvEventFrames {
    std::uint64_t sequence{0};
    std::string_view payload;
    bool end_of_replay{false};
};
Result<KvEventFrames> ParseKvEventFrames(Frames frames);

}  // namespace rankgate::wire

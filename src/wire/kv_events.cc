// SPDX-License-Identifier: Apache-2.0
#include "wire/kv_events.h"

#include <cstring>
#include <string>

#include "wire/fields.h"
#include "wire/msgpack.h"

namespace rankgate::wire {

using internal::FieldError;

namespace {

constexpr std::size_t kMaxEvents = 1 << 16;
constexpr std::uint64_t kEndOfReplay = ~std::uint64_t{0};

/// An unsigned integer, or a digest whose last eight bytes are that integer.
bool ReadHash(Reader& reader, std::uint64_t& hash) noexcept {
    if (reader.Peek() != MsgType::kBin) {
        return reader.ReadUint(hash);
    }
    const std::size_t at = reader.offset();
    std::string_view digest;
    if (!reader.ReadBin(digest)) {
        return false;
    }
    if (digest.size() < sizeof hash) {
        return reader.Reject(at);
    }
    hash = internal::LoadBig<std::uint64_t>(digest.data() + digest.size() - sizeof hash);
    return true;
}

bool ReadHashes(Reader& reader, KvEvent& event, KvEventBatch& out) {
    std::uint32_t count = 0;
    if (!reader.ReadArray(count)) {
        return false;
    }
    event.first_hash = static_cast<std::uint32_t>(out.hashes.size());
    for (std::uint32_t i = 0; i < count; ++i) {
        if (!ReadHash(reader, out.hashes.emplace_back())) {
            return false;
        }
    }
    event.num_hashes = count;
    return true;
}

bool ReadTokens(Reader& reader, KvEvent& event, KvEventBatch& out) {
    std::uint32_t count = 0;
    if (!reader.ReadArray(count)) {
        return false;
    }
    event.first_token = static_cast<std::uint32_t>(out.tokens.size());
    for (std::uint32_t i = 0; i < count; ++i) {
        if (!reader.ReadInt32(out.tokens.emplace_back())) {
            return false;
        }
    }
    event.num_tokens = count;
    return true;
}

bool ReadParent(Reader& reader, KvEvent& event) noexcept {
    if (reader.TryNil()) {
        return true;
    }
    event.has_parent = true;
    return ReadHash(reader, event.parent_hash);
}

bool ReadWord(Reader& reader, std::string_view& word) noexcept {
    return reader.TryNil() || reader.ReadStr(word);
}

/// Fields by name; the positional form is the same list in this order, after the tag.
constexpr std::string_view kStoredFields[] = {"block_hashes",
                                              "parent_block_hash",
                                              "token_ids",
                                              "block_size",
                                              "lora_id",
                                              "medium",
                                              "lora_name",
                                              "extra_keys",
                                              "group_idx",
                                              "kv_cache_spec_kind",
                                              "kv_cache_spec_sliding_window"};
constexpr std::string_view kRemovedFields[] = {"block_hashes", "medium", "group_idx"};

bool ReadField(Reader& reader, std::string_view name, KvEvent& event, KvEventBatch& out) {
    if (name == "block_hashes") {
        return ReadHashes(reader, event, out);
    }
    if (name == "parent_block_hash") {
        return ReadParent(reader, event);
    }
    if (name == "token_ids") {
        return ReadTokens(reader, event, out);
    }
    if (name == "block_size") {
        return reader.ReadInt(event.block_size);
    }
    if (name == "medium") {
        return ReadWord(reader, event.medium);
    }
    if (name == "lora_name") {
        return ReadWord(reader, event.lora_name);
    }
    if (name == "extra_keys") {
        return reader.TryNil() || reader.ReadRaw(event.extra_keys);
    }
    if (name == "group_idx") {
        return reader.TryNil() || reader.ReadInt(event.group_idx);
    }
    if (name == "kv_cache_spec_kind") {
        return ReadWord(reader, event.kv_cache_spec_kind);
    }
    return reader.Skip();
}

KvEvent::Kind KindOf(std::string_view tag) noexcept {
    if (tag == "BlockStored") {
        return KvEvent::Kind::kBlockStored;
    }
    if (tag == "BlockRemoved") {
        return KvEvent::Kind::kBlockRemoved;
    }
    if (tag == "AllBlocksCleared") {
        return KvEvent::Kind::kAllBlocksCleared;
    }
    return KvEvent::Kind::kUnknown;
}

bool ReadEvent(Reader& reader, KvEvent& event, KvEventBatch& out) {
    std::uint32_t count = 0;
    if (reader.Peek() == MsgType::kMap) {
        if (!reader.ReadMap(count)) {
            return false;
        }
        for (std::uint32_t i = 0; i < count; ++i) {
            std::string_view key;
            if (!internal::TakeKey(reader, key)) {
                return false;
            }
            std::string_view tag;
            if (key == "type") {
                if (!reader.ReadStr(tag)) {
                    return false;
                }
                event.kind = KindOf(tag);
            } else if (!ReadField(reader, key, event, out)) {
                return false;
            }
        }
        return true;
    }
    std::string_view tag;
    if (!reader.ReadArray(count) || count == 0 || !reader.ReadStr(tag)) {
        return reader.ok() ? reader.Reject(reader.offset()) : false;
    }
    event.kind = KindOf(tag);
    std::span<const std::string_view> fields;
    if (event.kind == KvEvent::Kind::kBlockStored) {
        fields = kStoredFields;
    } else if (event.kind == KvEvent::Kind::kBlockRemoved) {
        fields = kRemovedFields;
    }
    for (std::uint32_t i = 1; i < count; ++i) {
        if (i - 1 < fields.size() ? !ReadField(reader, fields[i - 1], event, out) : !reader.Skip()) {
            return false;
        }
    }
    return true;
}

bool ReadEvents(Reader& reader, KvEventBatch& out) {
    const std::size_t at = reader.offset();
    std::uint32_t count = 0;
    if (!reader.ReadArray(count)) {
        return false;
    }
    if (count > kMaxEvents) {
        return reader.Reject(at);
    }
    for (std::uint32_t i = 0; i < count; ++i) {
        const Reader before = reader;
        const std::size_t hashes = out.hashes.size();
        const std::size_t tokens = out.tokens.size();
        KvEvent event;
        if (!ReadEvent(reader, event, out)) {
            reader = before;
            if (!reader.Skip()) {
                return false;
            }
            out.hashes.resize(hashes);
            out.tokens.resize(tokens);
            event = KvEvent{};
        }
        out.events.push_back(event);
    }
    return true;
}

}  // namespace

void KvEventBatch::Clear() noexcept {
    timestamp = 0.0;
    data_parallel_rank = -1;
    events.clear();
    hashes.clear();
    tokens.clear();
}

Status DecodeKvEvents(std::string_view payload, KvEventBatch& out) {
    out.Clear();
    Reader reader{payload};
    std::uint32_t count = 0;
    if (reader.Peek() == MsgType::kMap) {
        if (reader.ReadMap(count)) {
            for (std::uint32_t i = 0; i < count && reader.ok(); ++i) {
                std::string_view key;
                if (!internal::TakeKey(reader, key)) {
                    break;
                }
                if (key == "ts") {
                    internal::TakeDouble(reader, out.timestamp);
                } else if (key == "events") {
                    ReadEvents(reader, out);
                } else if (key == "data_parallel_rank") {
                    internal::TakeInt(reader, out.data_parallel_rank);
                } else {
                    reader.Skip();
                }
            }
        }
    } else if (reader.ReadArray(count)) {
        if (count < 2) {
            reader.Reject(0);
        }
        if (reader.ok() && internal::TakeDouble(reader, out.timestamp) && ReadEvents(reader, out) &&
            count > 2) {
            internal::TakeInt(reader, out.data_parallel_rank);
            reader.Skip(count - 3);
        }
    }
    if (!reader.Done()) {
        out.Clear();
        return FieldError("KV events", "",
                          reader.ok() ? std::string_view{"trailing bytes"} : MsgErrorName(reader.error()));
    }
    return {};
}

Result<KvEventFrames> ParseKvEventFrames(Frames frames) {
    if (frames.size() < 2) {
        return FieldError("KV events", "", "fewer than two frames");
    }
    const std::string_view sequence = frames[frames.size() - 2];
    if (sequence.size() != sizeof(std::uint64_t)) {
        return FieldError("KV events", "sequence", "not eight bytes");
    }
    KvEventFrames out;
    out.sequence = internal::LoadBig<std::uint64_t>(sequence.data());
    out.payload = frames.back();
    out.end_of_replay = out.sequence == kEndOfReplay && out.payload.empty();
    return out;
}

}  // namespace rankgate::wire

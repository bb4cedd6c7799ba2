// SPDX-License-Identifier: Apache-2.0
#include "wire/handshake.h"

#include <cstdint>

#include "wire/fields.h"
#include "wire/msgpack.h"

namespace rankgate::wire {

using internal::FieldError;
using internal::SkipWrong;

namespace {

void OptionalStr(Writer& writer, const std::optional<std::string>& value) {
    value ? writer.Str(*value) : writer.Nil();
}
void OptionalInt(Writer& writer, const std::optional<std::int64_t>& value) {
    value ? writer.Int(*value) : writer.Nil();
}

/// Reads a list of addresses; wrong shapes are errors here, since an engine without addresses is nothing.
Status ReadAddresses(Reader& reader, std::string_view field, std::vector<std::string>& out) {
    std::uint32_t count = 0;
    if (!reader.ReadArray(count)) {
        return FieldError("INIT", field, reader.error());
    }
    if (count == 0 || count > kMaxAddresses) {
        return FieldError("INIT", field, "needs 1 to 1024 addresses");
    }
    for (std::uint32_t i = 0; i < count; ++i) {
        std::string_view address;
        if (!reader.ReadStr(address)) {
            return FieldError("INIT", field, reader.error());
        }
        if (address.empty() || address.size() > kMaxAddressBytes || !IsValidUtf8(address)) {
            return FieldError("INIT", field, "bad address");
        }
        out.emplace_back(address);
    }
    return {};
}

bool ReadParallelConfig(Reader& reader, InitMessage& init) {
    std::uint32_t pairs = 0;
    if (!reader.ReadMap(pairs)) {
        return SkipWrong(reader);
    }
    for (std::uint32_t i = 0; i < pairs; ++i) {
        std::string_view key;
        if (!internal::TakeKey(reader, key)) {
            return false;
        }
        if (init.parallel_config.size() >= kMaxParallelConfigEntries) {
            if (!reader.Skip()) {
                return false;
            }
            continue;
        }
        const MsgType type = reader.Peek();
        if (type == MsgType::kInt) {
            std::int64_t value = 0;
            if (!internal::TakeInt(reader, value)) {
                return false;
            }
            init.parallel_config.emplace_back(std::string{key}, value);
        } else if (type == MsgType::kStr) {
            std::string value;
            if (!internal::TakeStr(reader, value)) {
                return false;
            }
            init.parallel_config.emplace_back(std::string{key}, std::move(value));
        } else if (type == MsgType::kArray) {
            std::uint32_t count = 0;
            std::vector<std::int64_t> values;
            if (!reader.ReadArray(count)) {
                return false;
            }
            for (std::uint32_t j = 0; j < count; ++j) {
                std::int64_t value = 0;
                if (!internal::TakeInt(reader, value)) {
                    return false;
                }
                values.push_back(value);
            }
            init.parallel_config.emplace_back(std::string{key}, std::move(values));
        } else if (!reader.Skip()) {
            return false;
        }
    }
    return true;
}

bool ReadKvEventsConfig(Reader& reader, std::optional<KvEventsConfig>& out) {
    std::uint32_t pairs = 0;
    if (!reader.ReadMap(pairs)) {
        return SkipWrong(reader);
    }
    KvEventsConfig config;
    for (std::uint32_t i = 0; i < pairs; ++i) {
        std::string_view key;
        if (!internal::TakeKey(reader, key)) {
            return false;
        }
        bool read = false;
        if (key == "enable_kv_cache_events") {
            read = internal::TakeBool(reader, config.enable_kv_cache_events);
        } else if (key == "publisher") {
            read = internal::TakeStr(reader, config.publisher);
        } else if (key == "endpoint") {
            read = internal::TakeStr(reader, config.endpoint);
        } else if (key == "replay_endpoint") {
            read = internal::TakeOptionalStr(reader, config.replay_endpoint);
        } else if (key == "buffer_steps") {
            read = internal::TakeInt(reader, config.buffer_steps);
        } else if (key == "hwm") {
            read = internal::TakeInt(reader, config.hwm);
        } else if (key == "max_queue_size") {
            read = internal::TakeInt(reader, config.max_queue_size);
        } else if (key == "topic") {
            read = internal::TakeStr(reader, config.topic);
        } else {
            read = reader.Skip();
        }
        if (!read) {
            return false;
        }
    }
    out = std::move(config);
    return true;
}

void WriteKvEventsConfig(Writer& writer, const std::optional<KvEventsConfig>& config) {
    if (!config) {
        writer.Nil();
        return;
    }
    writer.Map(8);
    writer.Str("enable_kv_cache_events");
    writer.Bool(config->enable_kv_cache_events);
    writer.Str("publisher");
    writer.Str(config->publisher);
    writer.Str("endpoint");
    writer.Str(config->endpoint);
    writer.Str("replay_endpoint");
    OptionalStr(writer, config->replay_endpoint);
    writer.Str("buffer_steps");
    writer.Int(config->buffer_steps);
    writer.Str("hwm");
    writer.Int(config->hwm);
    writer.Str("max_queue_size");
    writer.Int(config->max_queue_size);
    writer.Str("topic");
    writer.Str(config->topic);
}

}  // namespace

std::string_view DialectName(Dialect dialect) noexcept {
    return dialect == Dialect::kVllm ? "vllm" : "tokenspeed";
}

std::string RankIdentity(std::int32_t rank) {
    RG_CHECK(rank >= 0 && rank <= kMaxRank);
    return {static_cast<char>(rank & 0xff), static_cast<char>(rank >> 8)};
}

std::optional<std::int32_t> RankOfIdentity(std::string_view identity) noexcept {
    if (identity.size() != 2) {
        return std::nullopt;
    }
    return static_cast<std::uint8_t>(identity[0]) | static_cast<std::uint8_t>(identity[1]) << 8;
}

void EncodeGreeting(const Greeting& greeting, Dialect dialect, std::string& out) {
    Writer writer{out};
    const bool hash = dialect == Dialect::kTokenSpeed || greeting.parallel_config_hash.has_value();
    writer.Map(hash ? 4 : 3);
    writer.Str("status");
    writer.Str(greeting.kind == Greeting::Kind::kHello ? "HELLO" : "READY");
    writer.Str("local");
    writer.Bool(greeting.local);
    writer.Str("headless");
    writer.Bool(greeting.headless);
    if (hash) {
        writer.Str("parallel_config_hash");
        OptionalStr(writer, greeting.parallel_config_hash);
    }
}

Result<Greeting> DecodeGreeting(std::string_view payload) {
    Reader reader{payload};
    Greeting greeting;
    greeting.headless = false;
    std::string_view status;
    std::uint32_t pairs = 0;
    if (!reader.ReadMap(pairs)) {
        return FieldError("greeting", "", reader.error());
    }
    for (std::uint32_t i = 0; i < pairs && reader.ok(); ++i) {
        std::string_view key;
        if (!internal::TakeKey(reader, key)) {
            break;
        }
        if (key == "status") {
            internal::TakeView(reader, status);
        } else if (key == "local") {
            internal::TakeBool(reader, greeting.local);
        } else if (key == "headless") {
            internal::TakeBool(reader, greeting.headless);
        } else if (key == "parallel_config_hash") {
            greeting.names_hash = true;
            internal::TakeOptionalStr(reader, greeting.parallel_config_hash);
        } else {
            reader.Skip();
        }
    }
    if (!reader.ok()) {
        return FieldError("greeting", "", reader.error());
    }
    if (status == "READY") {
        greeting.kind = Greeting::Kind::kReady;
    } else if (status != "HELLO") {
        return FieldError("greeting", "status", "neither HELLO nor READY");
    }
    return greeting;
}

void EncodeInit(const InitMessage& init, std::string& out) {
    Writer writer{out};
    writer.Map(2);
    writer.Str("addresses");
    writer.Map(5);
    writer.Str("inputs");
    writer.Array(init.inputs.size());
    for (const std::string& address : init.inputs) {
        writer.Str(address);
    }
    writer.Str("outputs");
    writer.Array(init.outputs.size());
    for (const std::string& address : init.outputs) {
        writer.Str(address);
    }
    writer.Str("coordinator_input");
    OptionalStr(writer, init.coordinator_input);
    writer.Str("coordinator_output");
    OptionalStr(writer, init.coordinator_output);
    writer.Str("frontend_stats_publish_address");
    OptionalStr(writer, init.frontend_stats_publish_address);
    writer.Str("parallel_config");
    writer.Map(init.parallel_config.size());
    for (const auto& [key, value] : init.parallel_config) {
        writer.Str(key);
        if (const auto* integer = std::get_if<std::int64_t>(&value)) {
            writer.Int(*integer);
        } else if (const auto* text = std::get_if<std::string>(&value)) {
            writer.Str(*text);
        } else if (const auto* list = std::get_if<std::vector<std::int64_t>>(&value)) {
            writer.Array(list->size());
            for (const std::int64_t element : *list) {
                writer.Int(element);
            }
        }
    }
}

Result<InitMessage> DecodeInit(std::string_view payload) {
    Reader reader{payload};
    InitMessage init;
    bool addressed = false;
    std::uint32_t pairs = 0;
    if (!reader.ReadMap(pairs)) {
        return FieldError("INIT", "", reader.error());
    }
    for (std::uint32_t i = 0; i < pairs && reader.ok(); ++i) {
        std::string_view key;
        if (!internal::TakeKey(reader, key)) {
            break;
        }
        if (key == "parallel_config") {
            init.parallel_config.clear();
            ReadParallelConfig(reader, init);
            continue;
        }
        if (key != "addresses") {
            reader.Skip();
            continue;
        }
        init.inputs.clear();
        init.outputs.clear();
        std::uint32_t inner = 0;
        if (!reader.ReadMap(inner)) {
            return FieldError("INIT", "addresses", reader.error());
        }
        addressed = true;
        for (std::uint32_t j = 0; j < inner && reader.ok(); ++j) {
            std::string_view name;
            if (!internal::TakeKey(reader, name)) {
                break;
            }
            if (name == "inputs" || name == "outputs") {
                std::vector<std::string>& list = name == "inputs" ? init.inputs : init.outputs;
                list.clear();
                if (Status read = ReadAddresses(reader, name, list); !read.ok()) {
                    return read.error();
                }
            } else if (name == "coordinator_input") {
                internal::TakeOptionalStr(reader, init.coordinator_input);
            } else if (name == "coordinator_output") {
                internal::TakeOptionalStr(reader, init.coordinator_output);
            } else if (name == "frontend_stats_publish_address") {
                internal::TakeOptionalStr(reader, init.frontend_stats_publish_address);
            } else {
                reader.Skip();
            }
        }
    }
    if (!reader.ok()) {
        return FieldError("INIT", "", reader.error());
    }
    if (!addressed) {
        return FieldError("INIT", "addresses", "missing");
    }
    if (init.inputs.empty()) {
        return FieldError("INIT", "inputs", "missing");
    }
    if (init.outputs.empty()) {
        return FieldError("INIT", "outputs", "missing");
    }
    return init;
}

void EncodeReadyResponse(const ReadyResponse& ready, Dialect dialect, std::string& out) {
    Writer writer{out};
    const bool vllm = dialect == Dialect::kVllm;
    const std::size_t own = ready.rankgate_load_mailbox ? 1 : 0;
    const auto integer = [&writer](std::string_view key, std::int64_t value) {
        writer.Str(key);
        writer.Int(value);
    };
    const auto text = [&writer](std::string_view key, const std::optional<std::string>& value) {
        writer.Str(key);
        OptionalStr(writer, value);
    };
    writer.Map((vllm ? 25 : 19) + own);
    integer("max_model_len", ready.max_model_len);
    integer("num_gpu_blocks", ready.num_gpu_blocks);
    integer("block_size", ready.block_size);
    text("dp_stats_address", ready.dp_stats_address);
    text("dtype", ready.dtype);
    if (!vllm) {
        text("multimodal_encoder_dtype", ready.multimodal_encoder_dtype);
    }
    text("vllm_version", ready.vllm_version);
    integer("world_size", ready.world_size);
    integer("data_parallel_size", ready.data_parallel_size);
    integer("tensor_parallel_size", ready.tensor_parallel_size);
    integer("pipeline_parallel_size", ready.pipeline_parallel_size);
    integer("decode_context_parallel_size", ready.decode_context_parallel_size);
    integer("data_parallel_rank", ready.data_parallel_rank);
    integer("max_num_seqs", ready.max_num_seqs);
    integer("max_num_batched_tokens", ready.max_num_batched_tokens);
    text("instance_id", ready.instance_id);
    if (vllm) {
        writer.Str("supports_lora");
        writer.Bool(ready.supports_lora);
        integer("max_loras", ready.max_loras);
        writer.Str("mamba_block_size");
        OptionalInt(writer, ready.mamba_block_size);
    }
    writer.Str("kv_cache_size_tokens");
    OptionalInt(writer, ready.kv_cache_size_tokens);
    writer.Str("kv_cache_max_concurrency");
    ready.kv_cache_max_concurrency ? writer.Float(*ready.kv_cache_max_concurrency) : writer.Nil();
    writer.Str("kv_events_config");
    WriteKvEventsConfig(writer, ready.kv_events_config);
    if (vllm) {
        text("weight_transfer_backend", ready.weight_transfer_backend);
        writer.Str("enable_sleep_mode");
        writer.Bool(ready.enable_sleep_mode);
        writer.Str("supports_draft_weight_updates");
        writer.Bool(ready.supports_draft_weight_updates);
        writer.Str("effective_attention_block_size");
        OptionalInt(writer, ready.effective_attention_block_size);
    }
    if (own != 0) {
        text("rankgate_load_mailbox", ready.rankgate_load_mailbox);
    }
}

Result<ReadyResponse> DecodeReadyResponse(std::string_view payload) {
    Reader reader{payload};
    ReadyResponse ready;
    ready.dtype.clear();
    std::optional<std::int64_t> max_model_len;
    std::optional<std::int64_t> num_gpu_blocks;
    std::optional<std::int64_t> block_size;
    std::optional<std::int64_t> data_parallel_size;
    std::optional<std::string> vllm_version;
    bool tokenspeed_keys = false;
    std::uint32_t pairs = 0;
    if (!reader.ReadMap(pairs)) {
        return FieldError("ready response", "", reader.error());
    }
    for (std::uint32_t i = 0; i < pairs && reader.ok(); ++i) {
        std::string_view key;
        if (!internal::TakeKey(reader, key)) {
            break;
        }
        if (key == "max_model_len") {
            internal::TakeOptionalInt(reader, max_model_len);
        } else if (key == "num_gpu_blocks") {
            internal::TakeOptionalInt(reader, num_gpu_blocks);
        } else if (key == "block_size" || key == "prefix_granularity") {
            const bool newer = key == "prefix_granularity";
            tokenspeed_keys = tokenspeed_keys || newer;
            if (block_size) {  // the first spelling seen counts
                reader.Skip();
            } else {
                ready.prefix_granularity_spelling = newer;
                internal::TakeOptionalInt(reader, block_size);
            }
        } else if (key == "dp_stats_address") {
            internal::TakeOptionalStr(reader, ready.dp_stats_address);
        } else if (key == "dtype") {
            internal::TakeStr(reader, ready.dtype);
        } else if (key == "multimodal_encoder_dtype") {
            tokenspeed_keys = true;
            internal::TakeOptionalStr(reader, ready.multimodal_encoder_dtype);
        } else if (key == "vllm_version") {
            internal::TakeOptionalStr(reader, vllm_version);
        } else if (key == "world_size") {
            internal::TakeInt(reader, ready.world_size);
        } else if (key == "data_parallel_size") {
            internal::TakeOptionalInt(reader, data_parallel_size);
        } else if (key == "tensor_parallel_size") {
            internal::TakeInt(reader, ready.tensor_parallel_size);
        } else if (key == "pipeline_parallel_size") {
            internal::TakeInt(reader, ready.pipeline_parallel_size);
        } else if (key == "decode_context_parallel_size") {
            internal::TakeInt(reader, ready.decode_context_parallel_size);
        } else if (key == "data_parallel_rank") {
            internal::TakeInt(reader, ready.data_parallel_rank);
        } else if (key == "max_num_seqs") {
            internal::TakeInt(reader, ready.max_num_seqs);
        } else if (key == "max_num_batched_tokens") {
            internal::TakeInt(reader, ready.max_num_batched_tokens);
        } else if (key == "instance_id") {
            internal::TakeStr(reader, ready.instance_id);
        } else if (key == "supports_lora") {
            internal::TakeBool(reader, ready.supports_lora);
        } else if (key == "max_loras") {
            internal::TakeInt(reader, ready.max_loras);
        } else if (key == "mamba_block_size") {
            internal::TakeOptionalInt(reader, ready.mamba_block_size);
        } else if (key == "kv_cache_size_tokens") {
            internal::TakeOptionalInt(reader, ready.kv_cache_size_tokens);
        } else if (key == "kv_cache_max_concurrency") {
            internal::TakeOptionalDouble(reader, ready.kv_cache_max_concurrency);
        } else if (key == "kv_events_config") {
            ReadKvEventsConfig(reader, ready.kv_events_config);
        } else if (key == "weight_transfer_backend") {
            internal::TakeOptionalStr(reader, ready.weight_transfer_backend);
        } else if (key == "enable_sleep_mode") {
            internal::TakeBool(reader, ready.enable_sleep_mode);
        } else if (key == "supports_draft_weight_updates") {
            internal::TakeBool(reader, ready.supports_draft_weight_updates);
        } else if (key == "effective_attention_block_size") {
            internal::TakeOptionalInt(reader, ready.effective_attention_block_size);
        } else if (key == "rankgate_load_mailbox") {
            internal::TakeOptionalStr(reader, ready.rankgate_load_mailbox);
        } else {
            reader.Skip();
        }
    }
    if (!reader.ok()) {
        return FieldError("ready response", "", reader.error());
    }
    if (!max_model_len || *max_model_len < 0) {
        return FieldError("ready response", "max_model_len", "missing or not a count");
    }
    if (!num_gpu_blocks || *num_gpu_blocks < 0) {
        return FieldError("ready response", "num_gpu_blocks", "missing or not a count");
    }
    if (!block_size || *block_size < 0) {
        return FieldError("ready response", "block_size", "missing or not a count");
    }
    if (!data_parallel_size || *data_parallel_size < 1) {
        return FieldError("ready response", "data_parallel_size", "missing or below 1");
    }
    if (!vllm_version) {
        return FieldError("ready response", "vllm_version", "missing");
    }
    if (ready.dtype != "bfloat16" && ready.dtype != "float16" && ready.dtype != "float32") {
        return FieldError("ready response", "dtype", "not one of bfloat16, float16, float32");
    }
    ready.max_model_len = *max_model_len;
    ready.num_gpu_blocks = *num_gpu_blocks;
    ready.block_size = *block_size;
    ready.data_parallel_size = *data_parallel_size;
    ready.vllm_version = std::move(*vllm_version);
    const bool named = ready.vllm_version.rfind("tokenspeed", 0) == 0;
    ready.dialect = named || tokenspeed_keys ? Dialect::kTokenSpeed : Dialect::kVllm;
    return ready;
}

}  // namespace rankgate::wire

// SPDX-License-Identifier: Apache-2.0
// C ABI of the tokenizer library (src/lib.rs): tokenizer.json models for src/text/json_tokenizer.cc, nobody else.
// All text is (pointer, length), UTF-8; invalid bytes are read as U+FFFD. Nothing unwinds out of these functions.
// Thread rule: rg_tok_load / rg_tok_free once; everything else from any number of threads at once.
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct RgTokenizer RgTokenizer;

/// Memory of the library; give it back with the matching free function. All zero = empty.
typedef struct {
    char* data;
    size_t size;
    size_t capacity;
} RgText;
typedef struct {
    uint32_t* data;
    size_t size;
    size_t capacity;
} RgIds;
typedef struct {
    const char* data;
    size_t size;
    /// 0: special tokens in it are plain text.
    uint8_t parse_special;
} RgSpan;

/// How one id decodes. `flags`: 1 special, 2 added, 4 byte fallback (as TokenTable::Flag). Called in ascending order of ids.
typedef void (*RgTokenSink)(void* context, uint32_t id, const char* bytes, size_t size, uint8_t flags);

/// `backend`: "auto" (fastokens, else hf), "fastokens", "hf". `config` (tokenizer_config.json) may be empty.
/// 0 = fine; else `error` says why.
int32_t rg_tok_load(const char* json, size_t json_size, const char* config, size_t config_size, const char* backend,
                    RgTokenizer** out, RgText* error);
void rg_tok_free(RgTokenizer* tokenizer);
/// Appends nothing on failure.
int32_t rg_tok_encode(const RgTokenizer* tokenizer, const RgSpan* spans, size_t count, uint8_t add_special, RgIds* out,
                      RgText* error);
void rg_tok_vocab(const RgTokenizer* tokenizer, RgTokenSink sink, void* context);
/// 1 when the decoder drops one space at the very start of a text.
uint8_t rg_tok_strips_leading_space(const RgTokenizer* tokenizer);
/// "fastokens" or "hf"; static.
const char* rg_tok_backend(const RgTokenizer* tokenizer);
/// The library's own decoding, for tests.
int32_t rg_tok_decode(const RgTokenizer* tokenizer, const uint32_t* ids, size_t count, uint8_t skip_special, RgText* out,
                      RgText* error);
void rg_text_free(RgText text);
void rg_ids_free(RgIds ids);

#ifdef __cplusplus
}
#endif

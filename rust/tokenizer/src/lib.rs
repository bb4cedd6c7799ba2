// SPDX-License-Identifier: Apache-2.0
//! The tokenizer.json reader behind the C ABI of ../rg_tokenizer.h: fastokens where it can read the file, Hugging Face tokenizers
//! otherwise (and as the oracle of the tests). Added tokens that only tokenizer_config.json names are merged in first.
//! Decoding is not done here: the table of id -> bytes is handed over once and the C++ side streams from it.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ffi::{c_char, c_void, CStr};
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::OnceLock;

use serde_json::{json, Value};

const SPECIAL: u8 = 1;
const ADDED: u8 = 2;
const BYTE: u8 = 4;

#[repr(C)]
pub struct RgText {
    data: *mut c_char,
    size: usize,
    capacity: usize,
}

#[repr(C)]
pub struct RgIds {
    data: *mut u32,
    size: usize,
    capacity: usize,
}

#[repr(C)]
pub struct RgSpan {
    data: *const c_char,
    size: usize,
    parse_special: u8,
}

enum Backend {
    Fast(Box<fastokens::Tokenizer>),
    // The second one reads no special tokens; it is only built when somebody needs it.
    Hf(Box<tokenizers::Tokenizer>, OnceLock<Box<tokenizers::Tokenizer>>),
}

struct Token {
    bytes: Vec<u8>,
    flags: u8,
}

pub struct RgTokenizer {
    backend: Backend,
    /// What add_special writes before and behind a text.
    prefix: Vec<u32>,
    suffix: Vec<u32>,
    tokens: BTreeMap<u32, Token>,
    strips_leading_space: bool,
}

impl RgTokenizer {
    fn encode(&self, text: &str, parse_special: bool) -> Result<Vec<u32>, String> {
        match &self.backend {
            Backend::Fast(t) => {
                let policy = if parse_special {
                    fastokens::AddedTokenPolicy::All
                } else {
                    fastokens::AddedTokenPolicy::SkipSpecial
                };
                t.encode_with_policy(text, false, policy).map_err(|e| e.to_string())
            }
            Backend::Hf(t, plain) => {
                let t = if parse_special {
                    t
                } else {
                    plain.get_or_init(|| {
                        let mut copy = t.clone();
                        copy.set_encode_special_tokens(true);
                        copy
                    })
                };
                t.encode_fast(text, false).map(|e| e.get_ids().to_vec()).map_err(|e| e.to_string())
            }
        }
    }

    fn encode_special(&self, text: &str) -> Result<Vec<u32>, String> {
        match &self.backend {
            Backend::Fast(t) => t.encode_with_special_tokens(text, true).map_err(|e| e.to_string()),
            Backend::Hf(t, _) => t.encode_fast(text, true).map(|e| e.get_ids().to_vec()).map_err(|e| e.to_string()),
        }
    }

    fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String, String> {
        match &self.backend {
            Backend::Fast(t) => t.decode(ids, skip_special).map_err(|e| e.to_string()),
            Backend::Hf(t, _) => t.decode(ids, skip_special).map_err(|e| e.to_string()),
        }
    }
}

// ---- decoder: what it does to one token, as far as a table can say it ----------------------------------------------------------------

#[derive(Default)]
struct Decoder {
    byte_level: bool,
    byte_fallback: bool,
    replace: Vec<(String, String)>,
    strips_leading_space: bool,
}

impl Decoder {
    fn read(&mut self, step: &Value, fused: &mut bool) -> Result<(), String> {
        let kind = step["type"].as_str().unwrap_or("?");
        match kind {
            "Sequence" => {
                for inner in step["decoders"].as_array().ok_or("a decoder sequence without decoders")? {
                    self.read(inner, fused)?;
                }
            }
            "ByteLevel" => self.byte_level = true,
            "ByteFallback" => self.byte_fallback = true,
            "Fuse" => *fused = true,
            "Replace" => {
                let pattern = step["pattern"]["String"].as_str().ok_or("a Replace decoder with a regular expression")?;
                self.replace.push((pattern.to_string(), step["content"].as_str().unwrap_or("").to_string()));
            }
            "Metaspace" => {
                let mark = step["replacement"].as_str().unwrap_or("\u{2581}");
                self.replace.push((mark.to_string(), " ".to_string()));
                let prepends = match step["prepend_scheme"].as_str() {
                    Some(scheme) => scheme != "never",
                    None => step["add_prefix_space"].as_bool().unwrap_or(true),
                };
                self.strips_leading_space |= prepends;
            }
            "Strip" => {
                let start = step["start"].as_u64().unwrap_or(0);
                let stop = step["stop"].as_u64().unwrap_or(0);
                if step["content"].as_str() != Some(" ") || start > 1 || stop != 0 || !*fused {
                    return Err("a Strip decoder that is not \"one leading space\"".into());
                }
                self.strips_leading_space |= start == 1;
            }
            other => return Err(format!("a decoder of type {other}")),
        }
        Ok(())
    }

    fn bytes(&self, token: &str, chars: &HashMap<char, u8>) -> (Vec<u8>, u8) {
        if self.byte_fallback && token.len() == 6 && token.starts_with("<0x") && token.ends_with('>') {
            if let Ok(byte) = u8::from_str_radix(&token[3..5], 16) {
                return (vec![byte], BYTE);
            }
        }
        if self.byte_level {
            let mapped: Option<Vec<u8>> = token.chars().map(|c| chars.get(&c).copied()).collect();
            return (mapped.unwrap_or_else(|| token.as_bytes().to_vec()), 0);
        }
        let mut text = token.to_string();
        for (from, to) in &self.replace {
            text = text.replace(from, to);
        }
        (text.into_bytes(), 0)
    }
}

/// GPT-2's alphabet: printable Latin-1 stands for itself, the other 68 bytes follow from U+0100 on.
fn byte_chars() -> HashMap<char, u8> {
    let mut next = 0x100u32;
    (0u32..256)
        .map(|b| {
            let own = (0x21..=0x7E).contains(&b) || (0xA1..=0xAC).contains(&b) || (0xAE..=0xFF).contains(&b);
            let c = if own {
                b
            } else {
                next += 1;
                next - 1
            };
            (char::from_u32(c).unwrap(), b as u8)
        })
        .collect()
}

// ---- loading ---------------------------------------------------------------------------------------------------------------------------

/// Tokens that only tokenizer_config.json names (added_tokens_decoder) join tokenizer.json's added_tokens.
fn merge_added(model: &mut Value, config: &Value) {
    let Some(decoder) = config["added_tokens_decoder"].as_object() else { return };
    if !model["added_tokens"].is_array() {
        model["added_tokens"] = json!([]);
    }
    let added = model["added_tokens"].as_array_mut().unwrap();
    let known: HashSet<u64> = added.iter().filter_map(|t| t["id"].as_u64()).collect();
    for (id, token) in decoder {
        let (Ok(id), Some(content)) = (id.parse::<u64>(), token["content"].as_str()) else { continue };
        if known.contains(&id) || content.is_empty() {
            continue;
        }
        let flag = |name: &str| token[name].as_bool().unwrap_or(false);
        added.push(json!({"id": id, "content": content, "single_word": flag("single_word"), "lstrip": flag("lstrip"),
                          "rstrip": flag("rstrip"), "normalized": flag("normalized"), "special": flag("special")}));
    }
    added.sort_by_key(|t| t["id"].as_u64().unwrap_or(u64::MAX));
}

fn vocabulary(model: &Value, decoder: &Decoder) -> Result<BTreeMap<u32, Token>, String> {
    let chars = byte_chars();
    let mut tokens = BTreeMap::new();
    match &model["model"]["vocab"] {
        Value::Object(map) => {
            for (text, id) in map {
                let id = id.as_u64().and_then(|v| u32::try_from(v).ok()).ok_or("a vocabulary entry without a proper id")?;
                let (bytes, flags) = decoder.bytes(text, &chars);
                tokens.insert(id, Token { bytes, flags });
            }
        }
        Value::Array(list) => {
            for (id, entry) in list.iter().enumerate() {
                let text = entry[0].as_str().ok_or("a vocabulary entry without text")?;
                let (bytes, flags) = decoder.bytes(text, &chars);
                tokens.insert(id as u32, Token { bytes, flags });
            }
        }
        _ => return Err("no vocabulary in tokenizer.json".into()),
    }
    for token in model["added_tokens"].as_array().into_iter().flatten() {
        let (Some(id), Some(text)) = (token["id"].as_u64().and_then(|v| u32::try_from(v).ok()), token["content"].as_str()) else {
            return Err("an added token without id or content".into());
        };
        let special = if token["special"].as_bool().unwrap_or(false) { SPECIAL } else { 0 };
        let (bytes, flags) = decoder.bytes(text, &chars);
        tokens.insert(id, Token { bytes, flags: flags | ADDED | special });
    }
    // Ids index tables; a file that names a huge one is damaged.
    match tokens.keys().next_back() {
        Some(&last) if last < 1 << 24 => Ok(tokens),
        Some(&last) => Err(format!("token id {last} is out of range")),
        None => Err("an empty vocabulary".into()),
    }
}

fn load(json: &str, config: &str, backend: &str) -> Result<RgTokenizer, String> {
    // A caught panic is an error of its call; its text goes there, not to stderr.
    static QUIET: std::sync::Once = std::sync::Once::new();
    QUIET.call_once(|| std::panic::set_hook(Box::new(|_| {})));
    // An encode must not start threads of its own: the caller's pool is the bound. Read once by the library, at its first encode.
    if std::env::var_os("FASTOKENS_BPE_THREADS").is_none() {
        std::env::set_var("FASTOKENS_BPE_THREADS", "1");
    }
    let mut model: Value = serde_json::from_str(json).map_err(|e| format!("tokenizer.json cannot be read: {e}"))?;
    if !model.is_object() {
        return Err("tokenizer.json is not a JSON object".into());
    }
    if !config.is_empty() {
        let config: Value = serde_json::from_str(config).map_err(|e| format!("tokenizer_config.json cannot be read: {e}"))?;
        merge_added(&mut model, &config);
    }
    model["truncation"] = Value::Null;
    model["padding"] = Value::Null;

    let mut decoder = Decoder::default();
    if model["decoder"].is_null() {
        return Err("tokenizer.json has no decoder, so ids cannot be streamed as text".into());
    }
    decoder
        .read(&model["decoder"].clone(), &mut false)
        .map_err(|what| format!("tokenizer.json has {what}, which cannot be streamed token by token"))?;
    let tokens = vocabulary(&model, &decoder)?;

    let whole_words = model["added_tokens"].as_array().into_iter().flatten().any(|t| t["single_word"].as_bool().unwrap_or(false));
    let fast = || fastokens::Tokenizer::from_json(model.clone()).map(|t| Backend::Fast(Box::new(t))).map_err(|e| e.to_string());
    let hf = || {
        tokenizers::Tokenizer::from_bytes(model.to_string())
            .map(|t| Backend::Hf(Box::new(t), OnceLock::new()))
            .map_err(|e| e.to_string())
    };
    // Both number added tokens as the file says only where there are no holes; a token under another id would be silently wrong.
    let checked = |backend: Backend| {
        for token in model["added_tokens"].as_array().into_iter().flatten() {
            let (Some(id), Some(content)) = (token["id"].as_u64(), token["content"].as_str()) else { continue };
            let got = match &backend {
                Backend::Fast(t) => t.token_to_id(content),
                Backend::Hf(t, _) => t.token_to_id(content),
            };
            if got.map(u64::from) != Some(id) {
                return Err(format!("the added token {content} has id {id}, but the library numbers it {got:?}"));
            }
        }
        Ok(backend)
    };
    let fast = || fast().and_then(checked);
    let hf = || hf().and_then(checked);
    let chosen = match backend {
        "fastokens" => fast(),
        "hf" => hf(),
        // fastokens matches added tokens without looking at word borders.
        "auto" if whole_words => hf(),
        "auto" => fast().or_else(|first| hf().map_err(|second| format!("{second} (fastokens: {first})"))),
        other => Err(format!("unknown tokenizer backend \"{other}\" (auto, fastokens, hf)")),
    }
    .map_err(|e| format!("tokenizer.json cannot be loaded: {e}"))?;

    let mut made = RgTokenizer {
        backend: chosen,
        prefix: vec![],
        suffix: vec![],
        tokens,
        strips_leading_space: decoder.strips_leading_space,
    };
    // Also the warm-up: the first encode builds tables that the first user should not wait for.
    let plain = made.encode("a", true)?;
    let wrapped = made.encode_special("a")?;
    if let Some(at) = wrapped.windows(plain.len().max(1)).position(|w| w == plain.as_slice()) {
        made.prefix = wrapped[..at].to_vec();
        made.suffix = wrapped[at + plain.len()..].to_vec();
    } else if wrapped != plain {
        return Err("the tokenizer's post-processor does more than add tokens around a text".into());
    }
    made.encode("The quick brown fox's 12345 été, 你好 \u{1F44B}\u{1F3FD}!\n\n\tx = [1, 2];  ", false)?;
    Ok(made)
}

// ---- C ABI -----------------------------------------------------------------------------------------------------------------------------

unsafe fn text<'a>(data: *const c_char, size: usize) -> std::borrow::Cow<'a, str> {
    if size == 0 {
        return "".into();
    }
    String::from_utf8_lossy(std::slice::from_raw_parts(data as *const u8, size))
}

fn give_text(out: *mut RgText, text: String) {
    let mut bytes = std::mem::ManuallyDrop::new(text.into_bytes());
    // SAFETY: `out` is the caller's (header).
    unsafe { *out = RgText { data: bytes.as_mut_ptr() as *mut c_char, size: bytes.len(), capacity: bytes.capacity() } };
}

fn give_ids(out: *mut RgIds, ids: Vec<u32>) {
    let mut ids = std::mem::ManuallyDrop::new(ids);
    // SAFETY: as above.
    unsafe { *out = RgIds { data: ids.as_mut_ptr(), size: ids.len(), capacity: ids.capacity() } };
}

/// Runs `body`; a panic becomes an error like any other.
fn guard<T>(error: *mut RgText, body: impl FnOnce() -> Result<T, String>) -> Option<T> {
    let result = catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|panic| {
        let what = panic
            .downcast_ref::<String>()
            .cloned()
            .or_else(|| panic.downcast_ref::<&str>().map(|s| s.to_string()))
            .unwrap_or_default();
        Err(format!("the tokenizer failed: {what}"))
    });
    match result {
        Ok(value) => Some(value),
        Err(what) => {
            give_text(error, what);
            None
        }
    }
}

/// # Safety
/// See ../rg_tokenizer.h.
#[no_mangle]
pub unsafe extern "C" fn rg_tok_load(
    json: *const c_char,
    json_size: usize,
    config: *const c_char,
    config_size: usize,
    backend: *const c_char,
    out: *mut *mut RgTokenizer,
    error: *mut RgText,
) -> i32 {
    let made = guard(error, || {
        let backend = CStr::from_ptr(backend).to_string_lossy();
        load(&text(json, json_size), &text(config, config_size), &backend)
    });
    match made {
        Some(made) => {
            *out = Box::into_raw(Box::new(made));
            0
        }
        None => 1,
    }
}

/// # Safety
/// See ../rg_tokenizer.h.
#[no_mangle]
pub unsafe extern "C" fn rg_tok_free(tokenizer: *mut RgTokenizer) {
    if !tokenizer.is_null() {
        drop(Box::from_raw(tokenizer));
    }
}

/// # Safety
/// See ../rg_tokenizer.h.
#[no_mangle]
pub unsafe extern "C" fn rg_tok_encode(
    tokenizer: *const RgTokenizer,
    spans: *const RgSpan,
    count: usize,
    add_special: u8,
    out: *mut RgIds,
    error: *mut RgText,
) -> i32 {
    let tokenizer = &*tokenizer;
    let ids = guard(error, || {
        let mut ids = if add_special != 0 { tokenizer.prefix.clone() } else { vec![] };
        for span in if count == 0 { &[] } else { std::slice::from_raw_parts(spans, count) } {
            let more = tokenizer.encode(&text(span.data, span.size), span.parse_special != 0)?;
            if ids.is_empty() {
                ids = more;
            } else {
                ids.extend_from_slice(&more);
            }
        }
        if add_special != 0 {
            ids.extend_from_slice(&tokenizer.suffix);
        }
        Ok(ids)
    });
    match ids {
        Some(ids) => {
            give_ids(out, ids);
            0
        }
        None => 1,
    }
}

/// # Safety
/// See ../rg_tokenizer.h.
#[no_mangle]
pub unsafe extern "C" fn rg_tok_vocab(
    tokenizer: *const RgTokenizer,
    sink: extern "C" fn(*mut c_void, u32, *const c_char, usize, u8),
    context: *mut c_void,
) {
    for (id, token) in &(*tokenizer).tokens {
        sink(context, *id, token.bytes.as_ptr() as *const c_char, token.bytes.len(), token.flags);
    }
}

/// # Safety
/// See ../rg_tokenizer.h.
#[no_mangle]
pub unsafe extern "C" fn rg_tok_strips_leading_space(tokenizer: *const RgTokenizer) -> u8 {
    (*tokenizer).strips_leading_space as u8
}

/// # Safety
/// See ../rg_tokenizer.h.
#[no_mangle]
pub unsafe extern "C" fn rg_tok_backend(tokenizer: *const RgTokenizer) -> *const c_char {
    match (*tokenizer).backend {
        Backend::Fast(_) => c"fastokens".as_ptr(),
        Backend::Hf(..) => c"hf".as_ptr(),
    }
}

/// # Safety
/// See ../rg_tokenizer.h.
#[no_mangle]
pub unsafe extern "C" fn rg_tok_decode(
    tokenizer: *const RgTokenizer,
    ids: *const u32,
    count: usize,
    skip_special: u8,
    out: *mut RgText,
    error: *mut RgText,
) -> i32 {
    let ids = if count == 0 { &[] } else { std::slice::from_raw_parts(ids, count) };
    match guard(error, || (*tokenizer).decode(ids, skip_special != 0)) {
        Some(text) => {
            give_text(out, text);
            0
        }
        None => 1,
    }
}

/// # Safety
/// See ../rg_tokenizer.h.
#[no_mangle]
pub unsafe extern "C" fn rg_text_free(text: RgText) {
    if text.capacity != 0 {
        drop(Vec::from_raw_parts(text.data as *mut u8, text.size, text.capacity));
    }
}

/// # Safety
/// See ../rg_tokenizer.h.
#[no_mangle]
pub unsafe extern "C" fn rg_ids_free(ids: RgIds) {
    if ids.capacity != 0 {
        drop(Vec::from_raw_parts(ids.data, ids.size, ids.capacity));
    }
}

// SPDX-License-Identifier: Apache-2.0
#include "text/model_assets.h"

#include <simdjson.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <system_error>

#include "base/utf8.h"
#include "text/backends.h"

namespace rankgate::text {
namespace {

namespace dom = simdjson::dom;
namespace fs = std::filesystem;

constexpr std::uintmax_t kMaxFileBytes = std::uintmax_t{256} << 20;
constexpr std::string_view kBytesTemplate =
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + "
    "'<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}";
// Byte tokenizer: far more than any test or load run asks for; the engine's own limit counts.
constexpr std::int64_t kBytesContext = 1'000'000;

Error Broken(const fs::path& file, const std::string& what) {
    return Error{ErrorCode::kInvalidArgument, file.string() + ": " + what, "model", false};
}

bool IsFile(const fs::path& path) {
    std::error_code ignored;
    return fs::is_regular_file(path, ignored);
}

Result<std::string> ReadFile(const fs::path& path) {
    std::error_code failed;
    const std::uintmax_t size = fs::file_size(path, failed);
    if (failed) {
        return Broken(path, failed.message());
    }
    if (size > kMaxFileBytes) {
        return Broken(path, "is too large (" + std::to_string(size) + " bytes)");
    }
    std::ifstream in{path, std::ios::binary};
    std::string text(static_cast<std::size_t>(size), '\0');
    if (!in.read(text.data(), static_cast<std::streamsize>(size))) {
        return Broken(path, "cannot be read");
    }
    return text;
}

// Many files carry integers beyond 64 bits (a "model_max_length" of 10^30), which the parser refuses: written
// as floats they pass.
std::string WithoutHugeIntegers(std::string_view json) {
    std::string out;
    bool in_string = false;
    for (std::size_t at = 0; at < json.size(); ++at) {
        const char c = json[at];
        if (in_string && c == '\\') {
            out += c;
            if (++at < json.size()) {
                out += json[at];
            }
            continue;
        }
        in_string = in_string != (c == '"');
        if (in_string || c < '0' || c > '9') {
            out += c;
            continue;
        }
        const std::size_t end = std::min(json.find_first_not_of("0123456789", at), json.size());
        const bool integer =
            (at == 0 ||
             (json[at - 1] != '.' && json[at - 1] != 'e' && json[at - 1] != 'E' && json[at - 1] != '+')) &&
            (end == json.size() || (json[end] != '.' && json[end] != 'e' && json[end] != 'E'));
        out.append(json, at, end - at);
        if (integer && end - at >= 19) {
            out += "e0";
        }
        at = end - 1;
    }
    return out;
}

// A JSON file that may be absent. `root` stays a null value then.
class JsonFile {
  public:
    Status Load(const fs::path& path) {
        if (!IsFile(path)) {
            return {};
        }
        Result<std::string> read = ReadFile(path);
        if (!read.ok()) {
            return read.error();
        }
        text_ = std::move(read).value();
        std::string_view json = text_;
        if (json.starts_with("\xEF\xBB\xBF")) {
            json.remove_prefix(3);
        }
        const std::string plain = WithoutHugeIntegers(json);
        dom::element root;
        const auto failed = parser_.parse(plain.data(), plain.size(), true).get(root);
        if (failed != simdjson::SUCCESS) {
            return Broken(path, std::string{"is not JSON: "} + simdjson::error_message(failed));
        }
        if (root.get_object().get(root_) != simdjson::SUCCESS) {
            return Broken(path, "is not a JSON object");
        }
        present_ = true;
        return {};
    }

    bool present() const noexcept { return present_; }
    const std::string& text() const noexcept { return text_; }

    std::optional<dom::element> Get(std::string_view key) const {
        dom::element out;
        if (!present_ || root_[key].get(out) != simdjson::SUCCESS || out.is_null()) {
            return std::nullopt;
        }
        return out;
    }
    std::optional<std::string> String(std::string_view key) const {
        const auto value = Get(key);
        std::string_view text;
        if (!value) {
            return std::nullopt;
        }
        if (value->get_string().get(text) == simdjson::SUCCESS) {
            return std::string{text};
        }
        // AddedToken written out: {"content": "<s>", "lstrip": false, ...}
        if ((*value)["content"].get_string().get(text) == simdjson::SUCCESS) {
            return std::string{text};
        }
        return std::nullopt;
    }
    std::optional<double> Number(std::string_view key) const {
        const auto value = Get(key);
        double number = 0;
        return value && value->get_double().get(number) == simdjson::SUCCESS ? std::optional{number}
                                                                             : std::nullopt;
    }
    std::optional<std::int64_t> Integer(std::string_view key) const {
        const auto value = Get(key);
        std::int64_t number = 0;
        return value && value->get_int64().get(number) == simdjson::SUCCESS ? std::optional{number}
                                                                            : std::nullopt;
    }

  private:
    std::string text_;
    dom::parser parser_;
    dom::object root_;
    bool present_{false};
};

// One id or a list of them.
void AddIds(const std::optional<dom::element>& value, std::vector<TokenId>& out) {
    const auto add = [&](dom::element item) {
        std::int64_t id = 0;
        if (item.get_int64().get(id) == simdjson::SUCCESS && id >= 0 && id <= INT32_MAX) {
            out.push_back(static_cast<TokenId>(id));
        }
    };
    if (!value) {
        return;
    }
    dom::array list;
    if (value->get_array().get(list) == simdjson::SUCCESS) {
        for (dom::element item : list) {
            add(item);
        }
    } else {
        add(*value);
    }
}

void SortUnique(std::vector<TokenId>& ids) {
    std::sort(ids.begin(), ids.end());
    ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
}

Result<std::shared_ptr<const ChatTemplate>> Compile(const fs::path& where, std::string source,
                                                    const TemplateTokens& tokens,
                                                    const RenderLimits& limits) {
    auto made = ChatTemplate::Compile(std::move(source), tokens, limits);
    if (!made.ok()) {
        return Error{ErrorCode::kInvalidArgument,
                     where.string() + ": " + made.error().message +
                         " Another template can be given with --chat-template.",
                     "chat_template", false};
    }
    return made;
}

struct Sources {
    fs::path where;  // for messages
    std::string chat;
    std::string tools;
};

Status CompileTemplates(ModelAssets& assets, Sources sources, const TemplateTokens& tokens,
                        const AssetOptions& options) {
    if (!options.chat_template.empty()) {
        sources.tools.clear();
        if (options.chat_template.find("{{") != std::string::npos ||
            options.chat_template.find("{%") != std::string::npos) {
            sources.where = "--chat-template";
            sources.chat = options.chat_template;
        } else {
            sources.where = "--chat-template " + options.chat_template;
            Result<std::string> read = ReadFile(options.chat_template);
            if (!read.ok()) {
                return Error::Invalid("chat_template", "--chat-template " + read.error().message);
            }
            sources.chat = std::move(read).value();
        }
    }
    if (!sources.chat.empty()) {
        auto made = Compile(sources.where, std::move(sources.chat), tokens, options.limits);
        if (!made.ok()) {
            return made.error();
        }
        assets.chat_template = std::move(made).value();
    }
    if (!sources.tools.empty()) {
        auto made = Compile(sources.where, std::move(sources.tools), tokens, options.limits);
        if (!made.ok()) {
            return made.error();
        }
        assets.tool_template = std::move(made).value();
    }
    return {};
}

Status FromGguf(ModelAssets& assets, const AssetOptions& options) {
    Result<GgufFacts> loaded = LoadGguf(assets.path);
    if (!loaded.ok()) {
        return loaded.error();
    }
    GgufFacts facts = std::move(loaded).value();
    if (!facts.name.empty()) {
        assets.name = facts.name;
    }
    assets.source = ModelAssets::Source::kGguf;
    assets.architecture = facts.architecture;
    assets.context_length = facts.context_length;
    assets.eos_token_ids = facts.end_ids;
    assets.tokenizer = facts.tokenizer;
    assets.eos_token_id = facts.tokenizer->eos();
    assets.vocab_size = static_cast<std::int64_t>(facts.tokenizer->vocab_size());
    return CompileTemplates(assets, {assets.path, facts.chat_template, facts.tool_template},
                            facts.template_tokens, options);
}

void ReadTemplates(const fs::path& dir, const JsonFile& config, Sources& out) {
    // A later source replaces an earlier one, as in transformers.
    const auto take = [&](dom::element value) {
        std::string_view text;
        dom::array named;
        if (value.get_string().get(text) == simdjson::SUCCESS) {
            out.chat = text;
        } else if (value.get_array().get(named) == simdjson::SUCCESS) {
            for (dom::element entry : named) {
                std::string_view name;
                if (entry["name"].get_string().get(name) == simdjson::SUCCESS &&
                    entry["template"].get_string().get(text) == simdjson::SUCCESS) {
                    if (name == "tool_use") {
                        out.tools = text;
                    } else if (name == "default") {
                        out.chat = text;
                    }
                }
            }
        }
    };
    if (const auto value = config.Get("chat_template")) {
        out.where = dir / "tokenizer_config.json";
        take(*value);
    }
    if (const fs::path file = dir / "chat_template.jinja"; IsFile(file)) {
        if (Result<std::string> read = ReadFile(file); read.ok()) {
            out.where = file;
            out.chat = std::move(read).value();
        }
    }
    if (const fs::path file = dir / "additional_chat_templates" / "tool_use.jinja"; IsFile(file)) {
        if (Result<std::string> read = ReadFile(file); read.ok()) {
            out.tools = std::move(read).value();
        }
    }
}

Status FromDirectory(ModelAssets& assets, const AssetOptions& options) {
    const fs::path dir{assets.path};
    fs::path tokenizer_dir = dir;
    fs::path tokenizer_file = dir / "tokenizer.json";
    if (!options.tokenizer_path.empty()) {
        const fs::path given{options.tokenizer_path};
        tokenizer_file = IsFile(given) ? given : given / "tokenizer.json";
        tokenizer_dir = tokenizer_file.parent_path();
    }
    if (!IsFile(tokenizer_file)) {
        return Broken(tokenizer_file,
                      "not found; the model directory needs a tokenizer.json (or give --tokenizer)");
    }
    JsonFile config;
    JsonFile tokenizer_config;
    JsonFile special_map;
    JsonFile generation;
    for (const auto& [file, path] : {std::pair{&config, dir / "config.json"},
                                     {&tokenizer_config, tokenizer_dir / "tokenizer_config.json"},
                                     {&special_map, tokenizer_dir / "special_tokens_map.json"},
                                     {&generation, dir / "generation_config.json"}}) {
        Status loaded = file->Load(path);
        if (!loaded.ok()) {
            return loaded;
        }
    }
    TemplateTokens tokens;
    std::string bos;
    std::string eos;
    for (const char* name :
         {"bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"}) {
        std::optional<std::string> literal = tokenizer_config.String(name);
        if (!literal) {
            literal = special_map.String(name);
        }
        if (literal) {
            tokens.emplace_back(name, *literal);
            if (std::string_view{name} == "bos_token") {
                bos = *literal;
            } else if (std::string_view{name} == "eos_token") {
                eos = *literal;
            }
        }
    }
    Result<std::string> json = ReadFile(tokenizer_file);
    if (!json.ok()) {
        return json.error();
    }
    auto tokenizer = LoadTokenizerJson(*json, tokenizer_config.text(), options.tokenizer_backend, bos, eos);
    if (!tokenizer.ok()) {
        Error error = tokenizer.error();
        error.message = tokenizer_file.string() + ": " + error.message;
        return error;
    }
    assets.source = ModelAssets::Source::kDirectory;
    assets.tokenizer = std::move(tokenizer).value();

    // Numbers of a multimodal model stand in its text_config.
    const auto model_integer = [&](std::string_view key) -> std::optional<std::int64_t> {
        if (const auto value = config.Integer(key)) {
            return value;
        }
        const auto inner = config.Get("text_config");
        std::int64_t number = 0;
        if (inner && (*inner)[key].get_int64().get(number) == simdjson::SUCCESS) {
            return number;
        }
        return std::nullopt;
    };
    for (const char* key :
         {"max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length"}) {
        if (const auto value = model_integer(key); value && *value > 0) {
            assets.context_length = *value;
            break;
        }
    }
    assets.vocab_size = std::max<std::int64_t>(model_integer("vocab_size").value_or(0),
                                               static_cast<std::int64_t>(assets.tokenizer->vocab_size()));
    if (const auto value = config.Get("architectures")) {
        dom::array list;
        std::string_view first;
        if (value->get_array().get(list) == simdjson::SUCCESS &&
            list.at(0).get_string().get(first) == simdjson::SUCCESS) {
            assets.architecture = first;
        }
    }

    // The tokenizer's EOS is the primary one; generation_config.json (else config.json) may name more.
    std::vector<TokenId> named;
    if (generation.Get("eos_token_id")) {
        AddIds(generation.Get("eos_token_id"), named);
    } else {
        AddIds(config.Get("eos_token_id"), named);
        if (const auto inner = config.Get("text_config"); named.empty() && inner) {
            dom::element value;
            if ((*inner)["eos_token_id"].get(value) == simdjson::SUCCESS) {
                AddIds(value, named);
            }
        }
    }
    assets.eos_token_id = assets.tokenizer->eos();
    if (!assets.eos_token_id && !named.empty()) {
        assets.eos_token_id = named.front();
    }
    assets.eos_token_ids = named;
    if (assets.eos_token_id) {
        assets.eos_token_ids.push_back(*assets.eos_token_id);
    }
    SortUnique(assets.eos_token_ids);

    if (options.use_generation_config) {
        GenerationDefaults& defaults = assets.defaults;
        defaults.temperature = generation.Number("temperature");
        defaults.top_p = generation.Number("top_p");
        defaults.min_p = generation.Number("min_p");
        defaults.repetition_penalty = generation.Number("repetition_penalty");
        if (const auto top_k = generation.Integer("top_k"); top_k && *top_k >= 0 && *top_k <= INT32_MAX) {
            defaults.top_k = static_cast<std::int32_t>(*top_k);
        }
        if (const auto most = generation.Integer("max_new_tokens"); most && *most > 0) {
            defaults.max_new_tokens = most;
        }
    }

    Sources sources{dir, "", ""};
    ReadTemplates(tokenizer_dir, tokenizer_config, sources);
    if (sources.chat.empty() && tokenizer_dir != dir) {
        JsonFile own;
        if (own.Load(dir / "tokenizer_config.json").ok()) {
            ReadTemplates(dir, own, sources);
        }
    }
    return CompileTemplates(assets, std::move(sources), tokens, options);
}

Status FromBytes(ModelAssets& assets, const AssetOptions& options) {
    assets.source = ModelAssets::Source::kBytes;
    assets.name = "bytes";
    assets.architecture = "bytes";
    assets.tokenizer = MakeByteTokenizer();
    assets.eos_token_id = assets.tokenizer->eos();
    assets.eos_token_ids = {*assets.eos_token_id};
    assets.context_length = kBytesContext;
    assets.vocab_size = static_cast<std::int64_t>(assets.tokenizer->vocab_size());
    return CompileTemplates(assets, {":bytes:", std::string{kBytesTemplate}, ""},
                            {{"bos_token", "<|endoftext|>"}, {"eos_token", "<|im_end|>"}}, options);
}

}  // namespace

Result<std::shared_ptr<const ModelAssets>> LoadModelAssets(const std::string& path,
                                                           const AssetOptions& options) {
    auto assets = std::make_shared<ModelAssets>();
    assets->path = path;
    fs::path place{path};
    if (place.filename().empty()) {
        place = place.parent_path();
    }
    assets->name = place.filename().string();
    Status loaded;
    std::error_code ignored;
    if (path == ":bytes:") {
        loaded = FromBytes(*assets, options);
    } else if (fs::is_directory(place, ignored)) {
        loaded = FromDirectory(*assets, options);
    } else if (IsFile(place)) {
        loaded = FromGguf(*assets, options);
    } else {
        return Error{ErrorCode::kInvalidArgument,
                     path +
                         " is neither a GGUF file nor a model directory (with tokenizer.json, config.json, "
                         "...); for a "
                         "name that the engine resolves, say where its tokenizer is with --tokenizer",
                     "model", false};
    }
    if (!loaded.ok()) {
        return loaded.error();
    }
    return std::shared_ptr<const ModelAssets>{std::move(assets)};
}

}  // namespace rankgate::text

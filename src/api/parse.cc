// SPDX-License-Identifier: Apache-2.0
// JSON bodies -> ParsedRequest. One pass over the top-level object: a sorted table names every field that is
// honoured or refused; a field that is not in it is accepted and ignored. Ranges that need no model are
// checked here.
#include <simdjson.h>

#include <algorithm>
#include <array>
#include <bitset>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <limits>
#include <utility>

#include "api/json_scan.h"
#include "api/request.h"
#include "base/log.h"
#include "base/utf8.h"
#include "text/chat_template.h"
#include "text/stop_matcher.h"

namespace rankgate::api {
namespace dom = simdjson::dom;

namespace {

using Element = dom::element;

// A body above this leaves big buffers behind; they are given back instead of being kept for the next
// request.
constexpr std::size_t kKeepBuffersBelow = std::size_t{4} << 20;
constexpr std::size_t kMaxShownValue = 64;
// Engines set their own limit below this (Features); above it nothing is left of any token.
constexpr double kMaxRepetitionPenalty = 100;
constexpr std::int64_t kInt32Max = std::numeric_limits<std::int32_t>::max();
constexpr std::int64_t kInt64Max = std::numeric_limits<std::int64_t>::max();
constexpr std::int64_t kInt64Min = std::numeric_limits<std::int64_t>::min();

std::string_view TypeName(const Element& value) noexcept {
    switch (value.type()) {
        case dom::element_type::ARRAY:
            return "an array";
        case dom::element_type::OBJECT:
            return "an object";
        case dom::element_type::INT64:
        case dom::element_type::UINT64:
            return "an integer";
        case dom::element_type::DOUBLE:
            return "a number";
        case dom::element_type::STRING:
            return "a string";
        case dom::element_type::BOOL:
            return "a boolean";
        case dom::element_type::NULL_VALUE:
            break;
    }
    return "null";
}

// Short enough for a message whatever the client sent.
std::string Shown(const Element& value) {
    if (value.is_array() || value.is_object()) {
        return std::string{TypeName(value)};
    }
    std::string text = simdjson::to_string(value);
    if (text.size() > kMaxShownValue) {
        text.resize(kMaxShownValue);
        text = ToValidUtf8(text) + "...";
    }
    return text;
}

std::string Shown(std::string_view text) {
    std::string shown = ToValidUtf8(text.substr(0, kMaxShownValue));
    if (text.size() > kMaxShownValue) {
        shown += "...";
    }
    return shown;
}

std::string At(std::string_view base, std::size_t index) {
    std::string path{base};
    path += '[';
    path += std::to_string(index);
    path += ']';
    return path;
}

struct State {
    ParsedRequest request;
    TokenizeRequest tokenize;
    Error error;
    dom::parser* second;  // for JSON inside strings

    bool has_messages{false};
    bool has_prompt{false};
    bool has_stream_options{false};
    bool has_tools{false};
    bool last_is_assistant{false};
    std::optional<bool> add_generation_prompt;
    std::optional<std::int64_t> max_tokens;
    std::optional<std::int64_t> max_completion_tokens;
    std::optional<std::int64_t> best_of;
    std::optional<std::int64_t> top_logprobs;
    std::string reasoning_effort;
    std::string structured_backend_field;
    std::string structured_backend;
    std::optional<std::string> whitespace_pattern;
    std::string whitespace_field;
    enum class ToolChoice : std::uint8_t { kAbsent, kNone, kAuto, kForced } tool_choice{ToolChoice::kAbsent};

    bool Fail(std::string_view param, std::string message) {
        error = Error::Invalid(std::string{param}, std::move(message));
        return false;
    }
    bool WrongType(std::string_view param, std::string_view expected, const Element& value) {
        std::string message = "'";
        message += param;
        message += "' must be ";
        message += expected;
        message += ", got ";
        message += TypeName(value);
        message += '.';
        return Fail(param, std::move(message));
    }
};

// ---- Scalars
// -------------------------------------------------------------------------------------------------------------------

bool ReadBool(State& state, std::string_view name, const Element& value, bool& out) {
    if (value.get(out) != simdjson::SUCCESS) {
        return state.WrongType(name, "a boolean", value);
    }
    return true;
}

// Whole numbers written as 1.0 are integers: some languages' JSON writers know no other form.
bool ReadInt(State& state, std::string_view name, const Element& value, std::int64_t low, std::int64_t high,
             std::int64_t& out) {
    bool in_range = true;
    if (value.is_int64()) {
        out = value.get_int64().value_unsafe();
    } else if (value.is_uint64()) {
        in_range = false;
    } else if (value.is_double()) {
        const double number = value.get_double().value_unsafe();
        if (number != std::floor(number)) {
            return state.WrongType(name, "an integer", value);
        }
        in_range = std::fabs(number) < 9007199254740992.0;  // beyond 2^53 it no longer says which integer
        out = in_range ? static_cast<std::int64_t>(number) : 0;
    } else {
        return state.WrongType(name, "an integer", value);
    }
    if (in_range && out >= low && out <= high) {
        return true;
    }
    std::string message = "'";
    message += name;
    message += "' must be an integer ";
    if (high == kInt64Max && low != kInt64Min) {
        message += "of at least " + std::to_string(low);
    } else {
        message += "between " + std::to_string(low) + " and " + std::to_string(high);
    }
    message += ", got " + Shown(value) + ".";
    return state.Fail(name, std::move(message));
}

template <class T>
bool ReadOptionalInt(State& state, std::string_view name, const Element& value, std::int64_t low,
                     std::int64_t high, std::optional<T>& out) {
    std::int64_t number = 0;
    if (!ReadInt(state, name, value, low, high, number)) {
        return false;
    }
    out = static_cast<T>(number);
    return true;
}

enum class Low : std::uint8_t { kIncluded, kExcluded };

bool ReadDouble(State& state, std::string_view name, const Element& value, double low, Low kind, double high,
                std::optional<double>& out) {
    double number = 0;
    if (!value.is_number()) {
        return state.WrongType(name, "a number", value);
    }
    if (value.get(number) != simdjson::SUCCESS) {
        return state.WrongType(name, "a number", value);
    }
    const bool above = kind == Low::kIncluded ? number >= low : number > low;
    if (!std::isfinite(number) || !above || number > high) {
        char text[96];
        std::snprintf(text, sizeof text, "' must be in %c%g, %g], got ", kind == Low::kIncluded ? '[' : '(',
                      low, high);
        return state.Fail(name, "'" + std::string{name} + text + Shown(value) + ".");
    }
    out = number;
    return true;
}

bool ReadString(State& state, std::string_view name, const Element& value, std::size_t max_bytes,
                std::string_view& out) {
    if (value.get(out) != simdjson::SUCCESS) {
        return state.WrongType(name, "a string", value);
    }
    if (out.size() > max_bytes) {
        return state.Fail(name, "'" + std::string{name} + "' is too long: " + std::to_string(out.size()) +
                                    " bytes, the limit is " + std::to_string(max_bytes) + ".");
    }
    return true;
}

bool ReadTokenIds(State& state, std::string_view name, const Element& value, std::size_t max_count,
                  std::vector<TokenId>& out) {
    dom::array array;
    if (value.get(array) != simdjson::SUCCESS) {
        return state.WrongType(name, "an array of token ids", value);
    }
    out.clear();
    out.reserve(std::min<std::size_t>(array.size(), max_count));
    for (const Element item : array) {
        if (out.size() == max_count) {
            return state.Fail(name, "'" + std::string{name} + "' holds more than " +
                                        std::to_string(max_count) + " token ids.");
        }
        std::int64_t id = 0;
        double whole = 0;
        if (item.is_double() && item.get(whole) == simdjson::SUCCESS && whole == std::floor(whole) &&
            std::fabs(whole) <= static_cast<double>(kInt32Max)) {
            id = static_cast<std::int64_t>(whole);
        } else if (!item.is_int64()) {
            if (item.is_uint64()) {
                return state.Fail(
                    name, "'" + std::string{name} + "' holds " + Shown(item) + ", which is no token id.");
            }
            return state.WrongType(name, "an array of integers", item);
        } else {
            id = item.get_int64().value_unsafe();
        }
        if (id < 0 || id > kInt32Max) {
            return state.Fail(
                name, "'" + std::string{name} + "' holds " + std::to_string(id) + ", which is no token id.");
        }
        out.push_back(static_cast<TokenId>(id));
    }
    return true;
}

// What a template is handed as JSON: it may nest less deep than a body may.
bool ReadForTemplate(State& state, std::string_view name, const Element& value, std::string& out) {
    out = simdjson::to_string(value);
    if (out.size() > kMaxTemplateBytes) {
        return state.Fail(name, "'" + std::string{name} + "' is too large: " + std::to_string(out.size()) +
                                    " bytes, the limit is " + std::to_string(kMaxTemplateBytes) + ".");
    }
    if (NestingOf(out) > static_cast<std::size_t>(text::kMaxJsonDepth)) {
        return state.Fail(name, "'" + std::string{name} + "' is nested deeper than " +
                                    std::to_string(text::kMaxJsonDepth) + " levels.");
    }
    return true;
}

// ---- Structured outputs
// --------------------------------------------------------------------------------------------------------

using Kind = wire::StructuredOutputs::Kind;

bool SetStructured(State& state, std::string_view field, Kind kind, std::string value) {
    SamplingFields& sampling = state.request.sampling;
    if (sampling.structured_outputs) {
        return state.Fail(
            field, "'" + std::string{field} + "' and '" + sampling.structured_outputs_field +
                       "' both constrain the output; only one kind of structured output can be asked for.");
    }
    if (value.size() > kMaxStructuredBytes) {
        return state.Fail(field, "'" + std::string{field} + "' is too long: the limit is " +
                                     std::to_string(kMaxStructuredBytes) + " bytes.");
    }
    sampling.structured_outputs.emplace();
    sampling.structured_outputs->kind = kind;
    sampling.structured_outputs->value = std::move(value);
    sampling.structured_outputs_field = field;
    return true;
}

// A schema as an object, or as a string that holds one.
bool SetSchema(State& state, std::string_view field, const Element& value) {
    if (value.is_object()) {
        return SetStructured(state, field, Kind::kJson, simdjson::to_string(value));
    }
    std::string_view text;
    if (value.get(text) != simdjson::SUCCESS) {
        return state.WrongType(field, "a JSON schema (an object or a string that holds one)", value);
    }
    if (text.size() > kMaxStructuredBytes) {
        return state.Fail(field, "'" + std::string{field} + "' is too long: the limit is " +
                                     std::to_string(kMaxStructuredBytes) + " bytes.");
    }
    Element schema;
    if (HasLoneSurrogate(text) ||
        state.second->parse(text.data(), text.size()).get(schema) != simdjson::SUCCESS ||
        !schema.is_object()) {
        return state.Fail(field, "'" + std::string{field} +
                                     "' is not a JSON schema: the string does not hold a JSON object.");
    }
    return SetStructured(state, field, Kind::kJson, std::string{text});
}

bool SetText(State& state, std::string_view field, Kind kind, const Element& value) {
    std::string_view text;
    if (!ReadString(state, field, value, kMaxStructuredBytes, text)) {
        return false;
    }
    if (text.empty()) {
        return state.Fail(field, "'" + std::string{field} + "' must not be empty.");
    }
    if (text.find('\0') != std::string_view::npos) {
        return state.Fail(field, "'" + std::string{field} + "' must not hold a NUL character.");
    }
    Element tag;
    if (kind == Kind::kStructuralTag &&
        (HasLoneSurrogate(text) ||
         state.second->parse(text.data(), text.size()).get(tag) != simdjson::SUCCESS || !tag.is_object())) {
        return state.Fail(field, "'" + std::string{field} + "' must be a string that holds a JSON object.");
    }
    return SetStructured(state, field, kind, std::string{text});
}

// Engines know no `choice`: it is a grammar with one alternative a choice.
bool SetChoice(State& state, std::string_view field, const Element& value) {
    dom::array array;
    if (value.get(array) != simdjson::SUCCESS) {
        return state.WrongType(field, "an array of strings", value);
    }
    std::string grammar = "root ::= ";
    std::size_t count = 0;
    for (const Element item : array) {
        std::string_view text;
        if (item.get(text) != simdjson::SUCCESS) {
            return state.WrongType(At(field, count), "a string", item);
        }
        if (text.find('\0') != std::string_view::npos) {
            return state.Fail(field, "'" + At(field, count) + "' must not hold a NUL character.");
        }
        if (++count > kMaxChoices) {
            return state.Fail(field, "'" + std::string{field} + "' holds more than " +
                                         std::to_string(kMaxChoices) + " choices.");
        }
        grammar += count == 1 ? "\"" : " | \"";
        for (const char c : text) {
            switch (c) {
                case '"':
                case '\\':
                    grammar += '\\';
                    grammar += c;
                    break;
                case '\n':
                    grammar += "\\n";
                    break;
                case '\r':
                    grammar += "\\r";
                    break;
                case '\t':
                    grammar += "\\t";
                    break;
                default:
                    grammar += c;
            }
        }
        grammar += '"';
        if (grammar.size() > kMaxStructuredBytes) {
            return state.Fail(field, "'" + std::string{field} + "' is too long.");
        }
    }
    if (count == 0) {
        return state.Fail(field, "'" + std::string{field} + "' must hold at least one choice.");
    }
    return SetStructured(state, field, Kind::kGrammar, std::move(grammar));
}

bool ReadResponseFormat(State& state, const Element& value) {
    constexpr std::string_view kName = "response_format";
    dom::object object;
    if (value.get(object) != simdjson::SUCCESS) {
        return state.WrongType(kName, "an object", value);
    }
    Element type_element;
    std::string_view type;
    if (object["type"].get(type_element) != simdjson::SUCCESS) {
        return state.Fail(kName, "'response_format.type' is required.");
    }
    if (type_element.get(type) != simdjson::SUCCESS) {
        return state.WrongType("response_format.type", "a string", type_element);
    }
    Element schema;
    if (type == "text") {
        return true;
    }
    if (type == "json_object") {
        if (object["schema"].get(schema) == simdjson::SUCCESS && !schema.is_null()) {
            return schema.is_object() ? SetStructured(state, kName, Kind::kJson, simdjson::to_string(schema))
                                      : state.WrongType("response_format.schema", "an object", schema);
        }
        return SetStructured(state, kName, Kind::kJsonObject, {});
    }
    if (type == "json_schema") {
        Element json_schema;
        if (object["json_schema"].get(json_schema) != simdjson::SUCCESS) {
            return state.Fail(kName, "'response_format.json_schema' is required for type json_schema.");
        }
        dom::object holder;
        if (json_schema.get(holder) != simdjson::SUCCESS) {
            return state.WrongType("response_format.json_schema", "an object", json_schema);
        }
        if (holder["schema"].get(schema) != simdjson::SUCCESS) {
            return state.Fail(kName, "'response_format.json_schema.schema' is required.");
        }
        return schema.is_object()
                   ? SetStructured(state, kName, Kind::kJson, simdjson::to_string(schema))
                   : state.WrongType("response_format.json_schema.schema", "an object", schema);
    }
    if (type == "structural_tag") {
        return SetStructured(state, kName, Kind::kStructuralTag, simdjson::to_string(value));
    }
    return state.Fail(
        kName,
        "'response_format.type' must be one of text, json_object, json_schema, structural_tag; got \"" +
            Shown(type) + "\".");
}

bool ReadBackend(State& state, std::string_view field, const Element& value) {
    std::string_view text;
    if (!ReadString(state, field, value, kMaxNameBytes, text)) {
        return false;
    }
    state.structured_backend = text;
    state.structured_backend_field = field;
    return true;
}

bool ReadWhitespacePattern(State& state, std::string_view field, const Element& value) {
    std::string_view text;
    if (!ReadString(state, field, value, kMaxNameBytes, text)) {
        return false;
    }
    state.whitespace_pattern = std::string{text};
    state.whitespace_field = field;
    return true;
}

bool ReadStructuredOutputs(State& state, const Element& value) {
    dom::object object;
    if (value.get(object) != simdjson::SUCCESS) {
        return state.WrongType("structured_outputs", "an object", value);
    }
    bool any_whitespace_off = false;
    bool additional_off = false;
    bool any_kind = false;
    for (const auto [key, item] : object) {
        if (item.is_null()) {
            continue;
        }
        const std::string field = "structured_outputs." + Shown(key);
        bool ok = true;
        if (key == "json") {
            ok = SetSchema(state, field, item);
        } else if (key == "regex") {
            ok = SetText(state, field, Kind::kRegex, item);
        } else if (key == "choice") {
            ok = SetChoice(state, field, item);
        } else if (key == "grammar") {
            ok = SetText(state, field, Kind::kGrammar, item);
        } else if (key == "structural_tag") {
            ok = SetText(state, field, Kind::kStructuralTag, item);
        } else if (key == "json_object") {
            bool on = false;
            ok = ReadBool(state, field, item, on) &&
                 (!on || SetStructured(state, field, Kind::kJsonObject, {}));
            any_kind |= ok && on;
            if (ok) {
                continue;
            }
        } else if (key == "disable_any_whitespace") {
            ok = ReadBool(state, field, item, any_whitespace_off);
            if (ok) {
                continue;
            }
        } else if (key == "disable_additional_properties") {
            ok = ReadBool(state, field, item, additional_off);
            if (ok) {
                continue;
            }
        } else if (key == "whitespace_pattern") {
            ok = ReadWhitespacePattern(state, field, item);
            if (ok) {
                continue;
            }
        } else if (key == "disable_fallback") {
            continue;  // there is no fallback here
        } else if (key == "_backend" || key == "backend") {
            ok = ReadBackend(state, field, item);
            if (ok) {
                continue;
            }
        } else {
            return state.Fail("structured_outputs", "'" + field + "' is not known.");
        }
        if (!ok) {
            state.error.param = "structured_outputs";
            return false;
        }
        any_kind = true;
    }
    if (!any_kind) {
        return state.Fail("structured_outputs",
                          "'structured_outputs' must name one of json, regex, choice, grammar, json_object, "
                          "structural_tag.");
    }
    state.request.sampling.structured_outputs->disable_any_whitespace = any_whitespace_off;
    state.request.sampling.structured_outputs->disable_additional_properties = additional_off;
    return true;
}

// ---- Messages
// ------------------------------------------------------------------------------------------------------------------

struct Content {
    enum class Kind : std::uint8_t { kAbsent, kNull, kText, kParts } kind{Kind::kAbsent};
    std::string_view text;
    std::string joined;      // of parts
    std::string parts_json;  // of parts
};

bool ReadContent(State& state, std::string_view path, const Element& value, Content& out) {
    if (value.is_null()) {
        out.kind = Content::Kind::kNull;
        return true;
    }
    if (value.get(out.text) == simdjson::SUCCESS) {
        out.kind = Content::Kind::kText;
        return true;
    }
    dom::array parts;
    if (value.get(parts) != simdjson::SUCCESS) {
        return state.WrongType(path, "a string or an array of parts", value);
    }
    out.kind = Content::Kind::kParts;
    out.parts_json = "[";
    std::size_t index = 0;
    for (const Element part : parts) {
        if (index == kMaxParts) {
            return state.Fail(
                path, "'" + std::string{path} + "' holds more than " + std::to_string(kMaxParts) + " parts.");
        }
        const std::string part_path = At(path, index);
        dom::object object;
        if (part.get(object) != simdjson::SUCCESS) {
            return state.WrongType(part_path, "an object", part);
        }
        std::string_view type;
        if (object["type"].get(type) != simdjson::SUCCESS) {
            return state.Fail(part_path + ".type",
                              "'" + part_path + ".type' is required and must be a string.");
        }
        if (type != "text" && type != "refusal") {
            return state.Fail(part_path, "Content parts of type \"" + Shown(type) +
                                             "\" are not supported by this model; only \"text\" parts are.");
        }
        Element text_element;
        if (object[type].get(text_element) != simdjson::SUCCESS) {
            return state.Fail(part_path, "'" + part_path + "." + std::string{type} + "' is required.");
        }
        std::string_view text;
        if (text_element.get(text) != simdjson::SUCCESS) {
            return state.WrongType(part_path + "." + std::string{type}, "a string", text_element);
        }
        if (index > 0) {
            out.joined += '\n';
            out.parts_json += ',';
        }
        out.joined += text;
        out.parts_json += R"({"type":"text","text":")";
        AppendJsonEscaped(out.parts_json, text);
        out.parts_json += "\"}";
        ++index;
    }
    out.parts_json += ']';
    return true;
}

void AppendStringMember(std::string& out, std::string_view key, std::string_view value) {
    out += ",\"";
    out += key;
    out += "\":\"";
    AppendJsonEscaped(out, value);
    out += '"';
}

// Arguments reach templates as JSON values, since most of them walk through the pairs. Absent, null and blank
// mean {}.
bool AppendArguments(State& state, const std::string& path, const Element* value, std::string& out) {
    out += R"(,"arguments":)";
    if (value == nullptr || value->is_null()) {
        out += "{}";
        return true;
    }
    std::string_view text;
    if (value->get(text) != simdjson::SUCCESS) {
        if (!value->is_object()) {
            return state.WrongType(path, "a string that holds a JSON object", *value);
        }
        out += simdjson::to_string(*value);
        return true;
    }
    if (text.find_first_not_of(" \t\r\n") == std::string_view::npos) {
        out += "{}";
        return true;
    }
    Element parsed;
    if (HasLoneSurrogate(text) ||
        state.second->parse(text.data(), text.size()).get(parsed) != simdjson::SUCCESS) {
        return state.Fail(path, "'" + path + "' is not valid JSON.");
    }
    if (parsed.is_null()) {
        out += "{}";
    } else {
        // Re-written, not copied: white space and line ends of the client would otherwise reach the
        // line-based parts of a prompt.
        out += simdjson::to_string(parsed);
    }
    return true;
}

bool AppendToolCalls(State& state, const std::string& path, const Element& value, std::string& out) {
    dom::array calls;
    if (value.get(calls) != simdjson::SUCCESS) {
        return state.WrongType(path, "an array", value);
    }
    std::size_t index = 0;
    for (const Element call : calls) {
        const std::string call_path = At(path, index);
        if (index == kMaxToolCalls) {
            return state.Fail(path,
                              "'" + path + "' holds more than " + std::to_string(kMaxToolCalls) + " calls.");
        }
        dom::object object;
        if (call.get(object) != simdjson::SUCCESS) {
            return state.WrongType(call_path, "an object", call);
        }
        dom::object function;
        if (object["function"].get(function) != simdjson::SUCCESS) {
            return state.Fail(call_path + ".function",
                              "'" + call_path + ".function' is required and must be an object.");
        }
        std::string_view name;
        if (function["name"].get(name) != simdjson::SUCCESS) {
            return state.Fail(call_path + ".function.name",
                              "'" + call_path + ".function.name' is required and must be a string.");
        }
        Element id;
        out += index == 0 ? R"(,"tool_calls":[{"type":"function")" : R"(,{"type":"function")";
        if (object["id"].get(id) == simdjson::SUCCESS && !id.is_null()) {
            std::string_view text;
            if (id.get(text) != simdjson::SUCCESS) {
                return state.WrongType(call_path + ".id", "a string", id);
            }
            AppendStringMember(out, "id", text);
        }
        out += R"(,"function":{"name":")";
        AppendJsonEscaped(out, name);
        out += '"';
        Element arguments;
        const bool given = function["arguments"].get(arguments) == simdjson::SUCCESS;
        if (!AppendArguments(state, call_path + ".function.arguments", given ? &arguments : nullptr, out)) {
            return false;
        }
        out += "}}";
        ++index;
    }
    if (index > 0) {
        out += ']';
    }
    return true;
}

bool ReadMessage(State& state, const std::string& path, const Element& value, bool& had_parts) {
    dom::object object;
    if (value.get(object) != simdjson::SUCCESS) {
        return state.WrongType(path, "an object", value);
    }
    std::string_view role;
    Content content;
    Element tool_calls;
    bool has_role = false;
    bool has_tool_calls = false;
    std::string members;  // everything after role and content
    constexpr std::array<std::string_view, 8> kKnown = {"content",   "role",         "tool_calls",
                                                        "name",      "tool_call_id", "reasoning_content",
                                                        "reasoning", "function_call"};
    std::bitset<kKnown.size()> seen;
    for (const auto [key, item] : object) {
        const auto known = std::find(kKnown.begin(), kKnown.end(), key);
        if (known != kKnown.end()) {
            const auto bit = static_cast<std::size_t>(known - kKnown.begin());
            if (seen[bit]) {
                const std::string field = path + "." + std::string{key};
                return state.Fail(field, "'" + field + "' is given more than once.");
            }
            seen[bit] = true;
        }
        if (key == "content") {
            content = {};
            if (!ReadContent(state, path + ".content", item, content)) {
                return false;
            }
            continue;
        }
        if (item.is_null()) {
            continue;
        }
        if (key == "role") {
            if (!ReadString(state, path + ".role", item, kMaxNameBytes, role)) {
                return false;
            }
            has_role = true;
        } else if (key == "tool_calls") {
            tool_calls = item;
            has_tool_calls = true;
        } else if (key == "name" || key == "tool_call_id" || key == "reasoning_content" ||
                   key == "reasoning") {
            std::string_view text;
            if (item.get(text) != simdjson::SUCCESS) {
                if (key == "reasoning") {
                    continue;  // an object in some clients' replayed histories; no template reads it
                }
                return state.WrongType(path + "." + std::string{key}, "a string", item);
            }
            AppendStringMember(members, key, text);
        } else if (key == "function_call") {
            return state.Fail(
                path + ".function_call",
                "'function_call' is not supported in messages; use 'tool_calls' and role \"tool\".");
        }
    }
    if (!has_role || role.empty()) {
        return state.Fail(path + ".role", "'" + path + ".role' is required.");
    }
    const std::string_view shown_role = role == "developer" ? std::string_view{"system"} : role;
    if (has_tool_calls) {
        if (role != "assistant" &&
            !(tool_calls.is_array() && tool_calls.get_array().value_unsafe().size() == 0)) {
            return state.Fail(path + ".tool_calls", "'tool_calls' belong to messages of role \"assistant\".");
        }
        if (!AppendToolCalls(state, path + ".tool_calls", tool_calls, members)) {
            return false;
        }
    }
    const bool missing = content.kind == Content::Kind::kAbsent || content.kind == Content::Kind::kNull;
    if (missing && role != "assistant") {
        return state.Fail(path + ".content",
                          "'" + path + ".content' is required and must be a string or an array of parts.");
    }

    const auto write = [&](std::string& out, bool parts) {
        out += out.size() > 1 ? R"(,{"role":")" : R"({"role":")";
        AppendJsonEscaped(out, shown_role);
        if (content.kind == Content::Kind::kParts && parts) {
            out += R"(","content":)";
            out += content.parts_json;
        } else {
            // An assistant turn without content and calls is kept as an empty one, so that replayed histories
            // go on working.
            out += R"(","content":")";
            AppendJsonEscaped(
                out, content.kind == Content::Kind::kParts ? std::string_view{content.joined} : content.text);
            out += '"';
        }
        out += members;
        out += '}';
    };
    ParsedRequest& request = state.request;
    if (content.kind == Content::Kind::kParts && !had_parts) {
        had_parts = true;
        request.messages_parts_json = request.messages_json;
    }
    if (had_parts) {
        write(request.messages_parts_json, true);
    }
    write(request.messages_json, false);
    state.last_is_assistant = role == "assistant";
    return true;
}

bool ReadMessages(State& state, const Element& value) {
    dom::array array;
    if (value.get(array) != simdjson::SUCCESS) {
        return state.WrongType("messages", "an array", value);
    }
    state.request.messages_json = "[";
    bool had_parts = false;
    std::size_t index = 0;
    for (const Element message : array) {
        if (index == kMaxMessages) {
            return state.Fail("messages",
                              "'messages' holds more than " + std::to_string(kMaxMessages) + " messages.");
        }
        if (!ReadMessage(state, At("messages", index), message, had_parts)) {
            return false;
        }
        ++index;
    }
    if (index == 0) {
        return state.Fail("messages", "'messages' must hold at least one message.");
    }
    state.request.messages_json += ']';
    if (had_parts) {
        state.request.messages_parts_json += ']';
    }
    state.has_messages = true;
    return true;
}

// ---- Tools
// ---------------------------------------------------------------------------------------------------------------------

bool ReadTools(State& state, const Element& value) {
    dom::array array;
    if (value.get(array) != simdjson::SUCCESS) {
        return state.WrongType("tools", "an array", value);
    }
    std::size_t index = 0;
    for (const Element tool : array) {
        const std::string path = At("tools", index);
        if (++index > kMaxTools) {
            return state.Fail("tools", "'tools' holds more than " + std::to_string(kMaxTools) + " tools.");
        }
        dom::object object;
        if (tool.get(object) != simdjson::SUCCESS) {
            state.WrongType(path, "an object", tool);
            state.error.param = "tools";
            return false;
        }
        std::string_view type;
        if (object["type"].get(type) != simdjson::SUCCESS || type != "function") {
            return state.Fail("tools", "'" + path + ".type' must be \"function\".");
        }
        std::string_view name;
        if (object["function"]["name"].get(name) != simdjson::SUCCESS || name.empty()) {
            return state.Fail("tools", "'" + path + ".function.name' is required and must be a string.");
        }
    }
    state.has_tools = index > 0;
    if (state.has_tools) {
        return ReadForTemplate(state, "tools", value, state.request.tools_json);
    }
    return true;
}

bool ReadToolChoice(State& state, const Element& value) {
    using ToolChoice = State::ToolChoice;
    std::string_view text;
    if (value.get(text) == simdjson::SUCCESS) {
        if (text == "none") {
            state.tool_choice = ToolChoice::kNone;
        } else if (text == "auto") {
            state.tool_choice = ToolChoice::kAuto;
        } else if (text == "required") {
            state.tool_choice = ToolChoice::kForced;
        } else {
            return state.Fail(
                "tool_choice",
                "'tool_choice' must be none, auto, required or an object, got \"" + Shown(text) + "\".");
        }
        return true;
    }
    if (!value.is_object()) {
        return state.WrongType("tool_choice", "a string or an object", value);
    }
    state.tool_choice = ToolChoice::kForced;
    return true;
}

// ---- The other fields
// ----------------------------------------------------------------------------------------------------------

bool ReadStop(State& state, const Element& value) {
    std::vector<std::string>& stop = state.request.sampling.stop;
    const auto add = [&](const Element& item) {
        std::string_view text;
        if (item.get(text) != simdjson::SUCCESS) {
            return state.WrongType("stop", "a string or an array of strings", item);
        }
        if (text.empty()) {
            return state.Fail("stop", "'stop' must not hold an empty string.");
        }
        if (text.size() > kMaxStopStringBytes) {
            return state.Fail("stop", "'stop' holds a string of " + std::to_string(text.size()) +
                                          " bytes; the limit is " + std::to_string(kMaxStopStringBytes) +
                                          ".");
        }
        if (stop.size() == kMaxStop) {
            return state.Fail("stop", "'stop' holds more than " + std::to_string(kMaxStop) + " strings.");
        }
        stop.emplace_back(text);
        return true;
    };
    dom::array array;
    if (value.get(array) != simdjson::SUCCESS) {
        return add(value);
    }
    for (const Element item : array) {
        if (!add(item)) {
            return false;
        }
    }
    return true;
}

bool ReadLogitBias(State& state, const Element& value) {
    constexpr std::string_view kName = "logit_bias";
    dom::object object;
    if (value.get(object) != simdjson::SUCCESS) {
        return state.WrongType(kName, "an object of token ids and biases", value);
    }
    auto& bias = state.request.sampling.logit_bias;
    for (const auto [key, item] : object) {
        std::int64_t id = -1;
        const auto [end, failed] = std::from_chars(key.data(), key.data() + key.size(), id);
        if (failed != std::errc{} || end != key.data() + key.size() || id < 0 || id > kInt32Max) {
            return state.Fail(kName, "'logit_bias' key \"" + Shown(key) + "\" is no token id.");
        }
        if (bias.size() == kMaxTokenList) {
            return state.Fail(
                kName, "'logit_bias' holds more than " + std::to_string(kMaxTokenList) + " token ids.");
        }
        double number = 0;
        if (!item.is_number() || item.get(number) != simdjson::SUCCESS) {
            return state.WrongType(kName, "an object whose values are numbers", item);
        }
        bias.emplace_back(static_cast<TokenId>(id), std::clamp(number, -100.0, 100.0));
    }
    // A key given twice counts once: the last one.
    std::stable_sort(bias.begin(), bias.end(),
                     [](const auto& a, const auto& b) { return a.first < b.first; });
    auto last = bias.begin();
    for (auto it = bias.begin(); it != bias.end(); ++it) {
        if (std::next(it) == bias.end() || std::next(it)->first != it->first) {
            *last++ = *it;
        }
    }
    bias.erase(last, bias.end());
    return true;
}

bool ReadBadWords(State& state, const Element& value) {
    dom::array array;
    if (value.get(array) != simdjson::SUCCESS) {
        return state.WrongType("bad_words", "an array of strings", value);
    }
    for (const Element item : array) {
        std::string_view text;
        if (!ReadString(state, "bad_words", item, kMaxBadWordBytes, text)) {
            return false;
        }
        // White space alone leaves no token once it is cut, and an engine that is told to ban nothing dies.
        if (text.find_first_not_of(" \t\r\n\f\v") == std::string_view::npos) {
            return state.Fail("bad_words", "'bad_words' must not hold an empty or blank string.");
        }
        if (state.request.sampling.bad_words.size() == kMaxBadWords) {
            return state.Fail("bad_words",
                              "'bad_words' holds more than " + std::to_string(kMaxBadWords) + " words.");
        }
        state.request.sampling.bad_words.emplace_back(text);
    }
    return true;
}

bool ReadPrompt(State& state, const Element& value) {
    constexpr std::string_view kName = "prompt";
    std::vector<Prompt>& prompts = state.request.prompts;
    state.has_prompt = true;
    std::string_view text;
    if (value.get(text) == simdjson::SUCCESS) {
        prompts.emplace_back(std::string{text});
        return true;
    }
    dom::array array;
    if (value.get(array) != simdjson::SUCCESS) {
        return state.WrongType(kName, "a string, an array of strings, or token ids", value);
    }
    if (array.size() == 0) {
        return state.Fail(kName, "'prompt' must not be empty.");
    }
    std::size_t all_ids = 0;
    const auto add_ids = [&](const Element& ids) {
        std::vector<TokenId> out;
        if (!ReadTokenIds(state, kName, ids, kMaxPromptIds - all_ids, out)) {
            return false;
        }
        all_ids += out.size();
        if (out.empty()) {
            return state.Fail(kName, "'prompt' must not hold an empty array of token ids.");
        }
        prompts.emplace_back(std::move(out));
        return true;
    };
    if (array.at(0).is_number()) {
        return add_ids(value);
    }
    for (const Element item : array) {
        if (prompts.size() == kMaxPrompts) {
            return state.Fail(kName, "'prompt' holds more than " + std::to_string(kMaxPrompts) + " prompts.");
        }
        if (item.get(text) == simdjson::SUCCESS) {
            prompts.emplace_back(std::string{text});
        } else if (!item.is_array()) {
            return state.WrongType(kName, "a string, an array of strings, or token ids", item);
        } else if (!add_ids(item)) {
            return false;
        }
    }
    return true;
}

bool ReadStreamOptions(State& state, const Element& value) {
    dom::object object;
    if (value.get(object) != simdjson::SUCCESS) {
        return state.WrongType("stream_options", "an object", value);
    }
    state.has_stream_options = true;
    for (const auto [key, item] : object) {
        if (item.is_null()) {
            continue;
        }
        bool* target = key == "include_usage"            ? &state.request.include_usage
                       : key == "continuous_usage_stats" ? &state.request.continuous_usage
                                                         : nullptr;
        if (target != nullptr && item.get(*target) != simdjson::SUCCESS) {
            return state.WrongType("stream_options",
                                   key == "include_usage" ? "an object with a boolean include_usage"
                                                          : "an object with a boolean continuous_usage_stats",
                                   item);
        }
    }
    return true;
}

bool ReadModalities(State& state, const Element& value) {
    dom::array array;
    if (value.get(array) != simdjson::SUCCESS) {
        return state.WrongType("modalities", "an array", value);
    }
    for (const Element item : array) {
        std::string_view text;
        if (item.get(text) != simdjson::SUCCESS || text != "text") {
            return state.Fail("modalities", "Only the modality \"text\" is supported.");
        }
    }
    return true;
}

bool ReadModel(State& state, const Element& value) {
    std::string_view text;
    if (value.get(text) != simdjson::SUCCESS) {
        return state.WrongType("model", "a string", value);
    }
    if (text.empty()) {
        return true;  // as if it were absent
    }
    if (text.size() > kMaxNameBytes) {
        state.error = ModelNotFound(text);
        return false;
    }
    state.request.model = std::string{text};
    return true;
}

constexpr std::uint8_t kChat = 1;
constexpr std::uint8_t kCompletion = 2;
constexpr std::uint8_t kTokenize = 4;
constexpr std::uint8_t kBoth = kChat | kCompletion;

struct Field {
    std::string_view name;
    std::uint8_t endpoints;
    bool (*read)(State&, std::string_view, const Element&);
};

using S = State;
using N = std::string_view;
using E = const Element&;

bool Refuse(State& state, std::string_view name, const Element&) {
    return state.Fail(name, "'" + std::string{name} + "' is not supported by this server.");
}

bool RefuseUnlessEmpty(State& state, std::string_view name, const Element& value) {
    std::string_view text;
    dom::array array;
    dom::object object;
    bool flag = true;
    const bool empty = (value.get(text) == simdjson::SUCCESS && text.empty()) ||
                       (value.get(array) == simdjson::SUCCESS && array.size() == 0) ||
                       (value.get(object) == simdjson::SUCCESS && object.size() == 0) ||
                       (value.get(flag) == simdjson::SUCCESS && !flag);
    return empty || Refuse(state, name, value);
}

// Sorted by name (checked below). Null values never get here: null means absent everywhere.
constexpr auto kFields = std::to_array<Field>({
    {"add_generation_prompt", kChat | kTokenize, [](S& s, N n, E v) {
         bool on = true;
         const bool ok = ReadBool(s, n, v, on);
         s.add_generation_prompt = on;
         return ok;
     }},
    {"add_special", kTokenize, [](S& s, N n, E v) { return ReadBool(s, n, v, s.tokenize.add_special_tokens); }},
    {"add_special_tokens", kBoth | kTokenize, [](S& s, N n, E v) {
         const bool ok = ReadBool(s, n, v, s.request.add_special_tokens);
         s.tokenize.add_special_tokens = s.request.add_special_tokens;
         return ok;
     }},
    {"allowed_token_ids", kBoth, [](S& s, N n, E v) {
         auto& ids = s.request.sampling.allowed_token_ids.emplace();
         if (!ReadTokenIds(s, n, v, kMaxTokenList, ids)) {
             return false;
         }
         return !ids.empty() || s.Fail(n, "'allowed_token_ids' must not be empty.");
     }},
    {"bad_words", kBoth, [](S& s, N, E v) { return ReadBadWords(s, v); }},
    {"best_of", kBoth, [](S& s, N n, E v) { return ReadOptionalInt(s, n, v, 1, kInt32Max, s.best_of); }},
    {"cache_salt", kBoth, [](S& s, N n, E v) {
         std::string_view text;
         if (!ReadString(s, n, v, kMaxNameBytes, text)) {
             return false;
         }
         if (text.empty()) {
             return s.Fail(n, "'cache_salt' must not be empty.");
         }
         s.request.cache_salt = std::string{text};
         return true;
     }},
    {"chat_template", kChat | kTokenize, [](S& s, N n, E v) {
         std::string_view text;
         if (!ReadString(s, n, v, kMaxStructuredBytes, text)) {
             return false;
         }
         s.request.chat_template = text;
         return true;
     }},
    {"chat_template_kwargs", kChat | kTokenize, [](S& s, N n, E v) {
         if (!v.is_object()) {
             return s.WrongType(n, "an object", v);
         }
         return ReadForTemplate(s, n, v, s.request.template_kwargs_json);
     }},
    {"content", kTokenize, [](S& s, N n, E v) {
         std::string_view text;
         const bool ok = ReadString(s, n, v, std::numeric_limits<std::size_t>::max(), text);
         s.has_prompt = true;
         s.tokenize.prompt = text;
         return ok;
     }},
    {"continue_final_message", kChat | kTokenize,
     [](S& s, N n, E v) { return ReadBool(s, n, v, s.request.continue_final_message); }},
    {"data_parallel_rank", kBoth,
     [](S& s, N n, E v) { return ReadOptionalInt(s, n, v, 0, kInt32Max, s.request.data_parallel_rank); }},
    {"documents", kChat, [](S& s, N n, E v) {
         if (!v.is_array()) {
             return s.WrongType(n, "an array", v);
         }
         return ReadForTemplate(s, n, v, s.request.documents_json);
     }},
    {"echo", kBoth, [](S& s, N n, E v) {
         if (!ReadBool(s, n, v, s.request.echo)) {
             return false;
         }
         return !s.request.echo || s.request.endpoint == Endpoint::kCompletion || Refuse(s, n, v);
     }},
    {"frequency_penalty", kBoth,
     [](S& s, N n, E v) { return ReadDouble(s, n, v, -2, Low::kIncluded, 2, s.request.sampling.frequency_penalty); }},
    {"function_call", kChat, [](S& s, N n, E v) {
         std::string_view text;
         return (v.get(text) == simdjson::SUCCESS && (text == "none" || text == "auto")) ||
                s.Fail(n, "'function_call' is not supported; use 'tools' and 'tool_choice'.");
     }},
    {"functions", kChat, [](S& s, N n, E v) {
         dom::array array;
         return (v.get(array) == simdjson::SUCCESS && array.size() == 0) ||
                s.Fail(n, "'functions' is not supported; use 'tools'.");
     }},
    {"guided_choice", kBoth, [](S& s, N n, E v) { return SetChoice(s, n, v); }},
    {"guided_decoding_backend", kBoth, [](S& s, N n, E v) { return ReadBackend(s, n, v); }},
    {"guided_grammar", kBoth, [](S& s, N n, E v) { return SetText(s, n, Kind::kGrammar, v); }},
    {"guided_json", kBoth, [](S& s, N n, E v) { return SetSchema(s, n, v); }},
    {"guided_regex", kBoth, [](S& s, N n, E v) { return SetText(s, n, Kind::kRegex, v); }},
    {"guided_whitespace_pattern", kBoth, [](S& s, N n, E v) { return ReadWhitespacePattern(s, n, v); }},
    {"ignore_eos", kBoth, [](S& s, N n, E v) { return ReadBool(s, n, v, s.request.sampling.ignore_eos); }},
    {"include_stop_str_in_output", kBoth,
     [](S& s, N n, E v) { return ReadBool(s, n, v, s.request.sampling.include_stop_str_in_output); }},
    {"kv_transfer_params", kBoth, RefuseUnlessEmpty},
    {"length_penalty", kBoth, [](S& s, N n, E v) {
         double number = 0;
         return (v.is_number() && v.get(number) == simdjson::SUCCESS && number == 1.0) ||
                s.Fail(n, "'length_penalty' belongs to beam search, which this server does not support.");
     }},
    {"logit_bias", kBoth, [](S& s, N, E v) { return ReadLogitBias(s, v); }},
    {"logits_processors", kBoth, RefuseUnlessEmpty},
    {"logprobs", kBoth, [](S& s, N n, E v) {
         if (s.request.endpoint == Endpoint::kChat) {
             return ReadBool(s, n, v, s.request.logprobs);
         }
         bool on = true;
         if (v.get(on) == simdjson::SUCCESS && !on) {
             return true;  // a flag of the chat route that is off asks for nothing here either
         }
         std::int64_t count = 0;
         if (!ReadInt(s, n, v, -1, kInt32Max, count)) {
             return false;
         }
         s.request.logprobs = true;
         s.request.top_logprobs = static_cast<std::int32_t>(count);
         return true;
     }},
    {"max_completion_tokens", kBoth, [](S& s, N n, E v) { return ReadOptionalInt(s, n, v, 1, kInt64Max, s.max_completion_tokens); }},
    {"max_tokens", kBoth, [](S& s, N n, E v) {
         // 0 is for completions that only echo; ParseCompletion looks again once it knows.
         return ReadOptionalInt(s, n, v, s.request.endpoint == Endpoint::kCompletion ? 0 : 1, kInt64Max, s.max_tokens);
     }},
    {"messages", kChat | kTokenize, [](S& s, N, E v) { return ReadMessages(s, v); }},
    {"min_p", kBoth, [](S& s, N n, E v) { return ReadDouble(s, n, v, 0, Low::kIncluded, 1, s.request.sampling.min_p); }},
    {"min_tokens", kBoth, [](S& s, N n, E v) { return ReadInt(s, n, v, 0, kInt64Max, s.request.sampling.min_tokens); }},
    {"modalities", kChat, [](S& s, N, E v) { return ReadModalities(s, v); }},
    {"model", kBoth | kTokenize, [](S& s, N, E v) { return ReadModel(s, v); }},
    {"n", kBoth, [](S& s, N n, E v) {
         std::int64_t number = 1;
         const bool ok = ReadInt(s, n, v, 1, kInt32Max, number);
         s.request.n = static_cast<std::int32_t>(number);
         return ok;
     }},
    {"presence_penalty", kBoth,
     [](S& s, N n, E v) { return ReadDouble(s, n, v, -2, Low::kIncluded, 2, s.request.sampling.presence_penalty); }},
    {"priority", kBoth, [](S& s, N n, E v) { return ReadInt(s, n, v, kInt64Min, kInt64Max, s.request.priority); }},
    {"prompt", kCompletion | kTokenize, [](S& s, N n, E v) {
         if (s.request.endpoint == Endpoint::kCompletion) {
             return ReadPrompt(s, v);
         }
         std::string_view text;
         const bool ok = ReadString(s, n, v, std::numeric_limits<std::size_t>::max(), text);
         s.has_prompt = true;
         s.tokenize.prompt = text;
         return ok;
     }},
    {"prompt_embeds", kBoth, Refuse},
    {"prompt_logprobs", kBoth,
     [](S& s, N n, E v) { return ReadOptionalInt(s, n, v, -1, kInt32Max, s.request.prompt_logprobs); }},
    {"reasoning_effort", kChat, [](S& s, N n, E v) {
         std::string_view text;
         const bool ok = ReadString(s, n, v, kMaxNameBytes, text);
         s.reasoning_effort = text;
         return ok;
     }},
    {"repetition_detection", kBoth, Refuse},
    {"repetition_penalty", kBoth,
     [](S& s, N n, E v) { return ReadDouble(s, n, v, 0, Low::kExcluded, kMaxRepetitionPenalty, s.request.sampling.repetition_penalty); }},
    {"request_id", kBoth, [](S& s, N n, E v) {
         std::string_view text;
         const bool ok = ReadString(s, n, v, kMaxNameBytes, text);
         s.request.request_id = std::string{text};
         return ok;
     }},
    {"response_format", kBoth, [](S& s, N, E v) {
         const bool ok = ReadResponseFormat(s, v);
         if (!ok) {
             s.error.param = "response_format";
         }
         return ok;
     }},
    {"return_token_ids", kBoth, [](S& s, N n, E v) { return ReadBool(s, n, v, s.request.return_token_ids); }},
    {"return_token_strs", kTokenize, [](S& s, N n, E v) { return ReadBool(s, n, v, s.tokenize.return_token_strs); }},
    {"return_tokens_as_token_ids", kBoth,
     [](S& s, N n, E v) { return ReadBool(s, n, v, s.request.return_tokens_as_token_ids); }},
    {"seed", kBoth, [](S& s, N n, E v) { return ReadOptionalInt(s, n, v, kInt64Min, kInt64Max, s.request.sampling.seed); }},
    {"skip_special_tokens", kBoth, [](S& s, N n, E v) { return ReadBool(s, n, v, s.request.sampling.skip_special_tokens); }},
    {"spaces_between_special_tokens", kBoth,
     [](S& s, N n, E v) { return ReadBool(s, n, v, s.request.sampling.spaces_between_special_tokens); }},
    {"stop", kBoth, [](S& s, N, E v) { return ReadStop(s, v); }},
    {"stop_token_ids", kBoth,
     [](S& s, N n, E v) { return ReadTokenIds(s, n, v, kMaxStopTokenIds, s.request.sampling.stop_token_ids); }},
    {"stream", kBoth, [](S& s, N n, E v) { return ReadBool(s, n, v, s.request.stream); }},
    // How many tokens an engine may gather before it speaks: checked, because 0 kills a TokenSpeed rank, and otherwise the engine's choice.
    {"stream_interval", kBoth, [](S& s, N n, E v) {
         std::int64_t ignored = 1;
         return ReadInt(s, n, v, 1, kInt32Max, ignored);
     }},
    {"stream_options", kBoth, [](S& s, N, E v) { return ReadStreamOptions(s, v); }},
    {"structural_tag", kBoth, [](S& s, N n, E v) { return SetText(s, n, Kind::kStructuralTag, v); }},
    {"structured_outputs", kBoth, [](S& s, N, E v) { return ReadStructuredOutputs(s, v); }},
    {"suffix", kBoth, RefuseUnlessEmpty},
    {"temperature", kBoth, [](S& s, N n, E v) { return ReadDouble(s, n, v, 0, Low::kIncluded, 2, s.request.sampling.temperature); }},
    {"thinking_token_budget", kBoth, [](S& s, N n, E v) {
         std::int64_t number = -1;
         if (!ReadInt(s, n, v, -1, kInt32Max, number)) {
             return false;
         }
         if (number >= 0) {
             s.request.sampling.thinking_token_budget = static_cast<std::int32_t>(number);
         }
         return true;
     }},
    {"tool_choice", kChat, [](S& s, N, E v) { return ReadToolChoice(s, v); }},
    {"tools", kChat | kTokenize, [](S& s, N, E v) { return ReadTools(s, v); }},
    {"top_k", kBoth, [](S& s, N n, E v) {
         std::int64_t number = 0;
         if (!ReadInt(s, n, v, -1, kInt32Max, number)) {
             return false;
         }
         s.request.sampling.top_k = static_cast<std::int32_t>(std::max<std::int64_t>(number, 0));
         return true;
     }},
    {"top_logprobs", kChat, [](S& s, N n, E v) { return ReadOptionalInt(s, n, v, -1, kInt32Max, s.top_logprobs); }},
    {"top_p", kBoth, [](S& s, N n, E v) { return ReadDouble(s, n, v, 0, Low::kExcluded, 1, s.request.sampling.top_p); }},
    {"truncate_prompt_tokens", kBoth,
     [](S& s, N n, E v) {
         if (!ReadOptionalInt(s, n, v, -1, kInt32Max, s.request.truncate_prompt_tokens)) {
             return false;
         }
         return s.request.truncate_prompt_tokens != 0 || s.Fail(n, "'truncate_prompt_tokens' must be -1 or at least 1, got 0.");
     }},
    {"use_beam_search", kBoth, RefuseUnlessEmpty},
    {"vllm_xargs", kBoth, RefuseUnlessEmpty},
    {"web_search_options", kChat, Refuse},
    {"with_pieces", kTokenize, [](S& s, N n, E v) { return ReadBool(s, n, v, s.tokenize.with_pieces); }},
});

static_assert(std::is_sorted(kFields.begin(), kFields.end(),
                             [](const Field& a, const Field& b) { return a.name < b.name; }));

bool ReadFields(State& state, const dom::object& object, std::uint8_t endpoint) {
    std::bitset<kFields.size()> seen;
    for (const auto [key, value] : object) {
        const auto found =
            std::lower_bound(kFields.begin(), kFields.end(), key,
                             [](const Field& field, std::string_view name) { return field.name < name; });
        if (found == kFields.end() || found->name != key || (found->endpoints & endpoint) == 0) {
            if (LogEnabled(LogLevel::kDebug)) {
                LogDebug("unknown_request_field", {{"field", Shown(key)}});
            }
            continue;
        }
        const auto index = static_cast<std::size_t>(found - kFields.begin());
        if (seen[index]) {
            return state.Fail(found->name, "'" + std::string{found->name} + "' is given more than once.");
        }
        seen[index] = true;
        if (!value.is_null() && !found->read(state, found->name, value)) {
            return false;
        }
    }
    return true;
}

// Rules that take more than one field.
bool FinishTemplate(State& state) {
    ParsedRequest& request = state.request;
    if (!state.has_messages) {
        return state.Fail("messages", "'messages' is required.");
    }
    if (request.continue_final_message) {
        if (state.add_generation_prompt.value_or(false)) {
            return state.Fail("continue_final_message",
                              "Cannot set both add_generation_prompt and continue_final_message to true.");
        }
        if (!state.last_is_assistant) {
            return state.Fail(
                "continue_final_message",
                "'continue_final_message' needs a last message of role \"assistant\" to continue.");
        }
        request.add_generation_prompt = false;
    } else {
        request.add_generation_prompt = state.add_generation_prompt.value_or(true);
    }
    if (!state.reasoning_effort.empty()) {
        std::string kwargs = R"({"reasoning_effort":")";
        AppendJsonEscaped(kwargs, state.reasoning_effort);
        kwargs += '"';
        if (request.template_kwargs_json.size() > 2) {
            // What stands in chat_template_kwargs comes later and so wins.
            kwargs += ',';
            kwargs.append(request.template_kwargs_json, 1);
        } else {
            kwargs += '}';
        }
        request.template_kwargs_json = std::move(kwargs);
    }
    return true;
}

bool FinishChat(State& state) {
    using ToolChoice = State::ToolChoice;
    ParsedRequest& request = state.request;
    if (!FinishTemplate(state)) {
        return false;
    }
    if (state.top_logprobs) {
        if (!request.logprobs && *state.top_logprobs != 0) {
            return state.Fail("top_logprobs", "'top_logprobs' needs 'logprobs' to be true.");
        }
        request.top_logprobs = static_cast<std::int32_t>(*state.top_logprobs);
    }
    if (state.has_tools && state.tool_choice != ToolChoice::kNone) {
        request.wants_tools = true;
    } else {
        if (state.tool_choice == ToolChoice::kForced) {
            return state.Fail("tool_choice", "'tool_choice' names a call, but there are no 'tools'.");
        }
        // Nothing may be called, so the model is not told of it either.
        request.tools_json.clear();
    }
    return true;
}

bool FinishCommon(State& state) {
    ParsedRequest& request = state.request;
    SamplingFields& sampling = request.sampling;
    if (state.has_stream_options && !request.stream) {
        return state.Fail("stream_options", "'stream_options' is only allowed when 'stream' is true.");
    }
    request.continuous_usage = request.continuous_usage && request.include_usage;
    if (state.best_of && *state.best_of != request.n) {
        return state.Fail("best_of", "'best_of' must equal 'n': this server does not rank candidates.");
    }
    // The newer spelling wins.
    sampling.max_tokens = state.max_completion_tokens ? state.max_completion_tokens : state.max_tokens;
    sampling.max_tokens_is_completion = state.max_completion_tokens.has_value();
    if (sampling.max_tokens && sampling.min_tokens > std::max<std::int64_t>(*sampling.max_tokens, 1)) {
        return state.Fail("min_tokens", "'min_tokens' (" + std::to_string(sampling.min_tokens) +
                                            ") must not be above 'max_tokens' (" +
                                            std::to_string(*sampling.max_tokens) + ").");
    }
    if (request.prompt_logprobs && request.stream) {
        return state.Fail("prompt_logprobs", "'prompt_logprobs' is not available when 'stream' is true.");
    }
    if (sampling.structured_outputs) {
        if (!state.structured_backend.empty()) {
            sampling.structured_outputs->backend = state.structured_backend;
        } else {
            sampling.structured_outputs->backend.clear();
        }
        sampling.structured_outputs->whitespace_pattern = std::move(state.whitespace_pattern);
    }
    if (!sampling.stop.empty()) {
        Result<std::shared_ptr<const text::StopSet>> set = text::StopSet::Compile(sampling.stop);
        if (!set.ok()) {
            state.error = std::move(set).error();
            state.error.param = "stop";
            return false;
        }
        sampling.stop_set = std::move(set).value();
    }
    return true;
}

bool FinishCompletion(State& state) {
    ParsedRequest& request = state.request;
    if (!state.has_prompt) {
        return state.Fail("prompt", "'prompt' is required.");
    }
    if (request.sampling.max_tokens == 0 && !request.echo) {
        return state.Fail("max_tokens",
                          "'max_tokens' must be at least 1 (0 is allowed together with 'echo').");
    }
    return true;
}

}  // namespace

struct Parser::Impl {
    std::unique_ptr<dom::parser> json{std::make_unique<dom::parser>()};
    std::unique_ptr<dom::parser> second{std::make_unique<dom::parser>()};

    // The top-level object of a body, or an error in the client's terms.
    Result<dom::object> Object(const std::string& body) {
        if (body.starts_with("\xEF\xBB\xBF")) {
            return Error::Invalid("", "The body must be JSON in UTF-8 without a byte order mark.");
        }
        if (HasLoneSurrogate(body)) {
            return Error::Invalid(
                "", "The body holds a lone surrogate (\\ud800 to \\udfff without its other half).");
        }
        const std::size_t wanted = body.size();
        if (json->max_depth() != kMaxJsonDepth &&
            json->allocate(std::max<std::size_t>(wanted, 4096), kMaxJsonDepth) != simdjson::SUCCESS) {
            return Error{ErrorCode::kInternal, "Out of memory.", {}, false};
        }
        const bool padded = body.capacity() - body.size() >= simdjson::SIMDJSON_PADDING;
        Element root;
        const simdjson::error_code failed =
            json->parse(reinterpret_cast<const std::uint8_t*>(body.data()), body.size(), !padded).get(root);
        if (failed != simdjson::SUCCESS) {
            return Refusal(body, failed);
        }
        dom::object object;
        if (root.get(object) != simdjson::SUCCESS) {
            return Error::Invalid("",
                                  "The body must be a JSON object, got " + std::string{TypeName(root)} + ".");
        }
        return object;
    }

    /// What all requests have in common: `read` makes of the body's object what it can and says whether that
    /// was all right; if not, the reason is in the state. Big buffers go back either way.
    template <class Read>
    bool Walk(const std::string& body, State& state, const Read& read) {
        state.second = second.get();
        Result<dom::object> object = Object(body);
        if (!object.ok()) {
            state.error = std::move(object).error();
        }
        const bool fine = object.ok() && read(*object);
        GiveBackBigBuffers(body.size());
        return fine;
    }

    static Error Refusal(const std::string& body, simdjson::error_code failed) {
        switch (failed) {
            case simdjson::EMPTY:
                return Error::Invalid("", "The body is empty; it must be a JSON object.");
            case simdjson::UTF8_ERROR:
                return Error::Invalid("", "The body is not valid UTF-8.");
            case simdjson::DEPTH_ERROR:
                return Error::Invalid(
                    "", "The body is nested deeper than " + std::to_string(kMaxJsonDepth) + " levels.");
            case simdjson::CAPACITY:
            case simdjson::MEMALLOC:
                return Error{ErrorCode::kTooLarge, "The body is too large.", {}, false};
            default:
                break;
        }
        if (std::string key = KeyOfUnrepresentableNumber(body); !key.empty()) {
            return Error::Invalid(Shown(key), "'" + Shown(key) + "' holds a number that is out of range.");
        }
        return Error::Invalid("", "The body is not valid JSON.");
    }

    void GiveBackBigBuffers(std::size_t body_size) {
        if (body_size > kKeepBuffersBelow) {
            json = std::make_unique<dom::parser>();
            second = std::make_unique<dom::parser>();
        }
    }
};

Parser::Parser() : impl_{std::make_unique<Impl>()} {}
Parser::~Parser() = default;
Parser::Parser(Parser&&) noexcept = default;
Parser& Parser::operator=(Parser&&) noexcept = default;

Result<ParsedRequest> Parser::ParseChat(const std::string& body) noexcept {
    State state;
    state.request.endpoint = Endpoint::kChat;
    const auto read = [&state](const dom::object& object) {
        return ReadFields(state, object, kChat) && FinishCommon(state) && FinishChat(state);
    };
    if (!impl_->Walk(body, state, read)) {
        return std::move(state.error);
    }
    return std::move(state.request);
}

Result<ParsedRequest> Parser::ParseCompletion(const std::string& body) noexcept {
    State state;
    state.request.endpoint = Endpoint::kCompletion;
    state.request.add_special_tokens = true;
    const auto read = [&state](const dom::object& object) {
        return ReadFields(state, object, kCompletion) && FinishCommon(state) && FinishCompletion(state);
    };
    if (!impl_->Walk(body, state, read)) {
        return std::move(state.error);
    }
    return std::move(state.request);
}

Result<TokenizeRequest> Parser::ParseTokenize(const std::string& body) noexcept {
    State state;
    state.request.endpoint = Endpoint::kChat;
    const auto read = [&state](const dom::object& object) {
        if (!ReadFields(state, object, kTokenize)) {
            return false;
        }
        if (state.has_messages && state.has_prompt) {
            return state.Fail("prompt", "'prompt' and 'messages' cannot both be given.");
        }
        if (!state.has_messages && !state.has_prompt) {
            return state.Fail("prompt", "'prompt' or 'messages' is required.");
        }
        return !state.has_messages || FinishTemplate(state);
    };
    if (!impl_->Walk(body, state, read)) {
        return std::move(state.error);
    }
    TokenizeRequest request = std::move(state.tokenize);
    request.model = state.request.model;
    request.is_chat = state.has_messages;
    request.chat = std::move(state.request);
    return request;
}

Result<DetokenizeRequest> Parser::ParseDetokenize(const std::string& body) noexcept {
    State state;
    DetokenizeRequest request;
    const auto read = [&state, &request](const dom::object& object) {
        bool has_tokens = false;
        for (const auto [key, value] : object) {
            if (key == "model" && !value.is_null()) {
                if (!ReadModel(state, value)) {
                    return false;
                }
                request.model = state.request.model;
            } else if (key == "tokens") {
                if (!ReadTokenIds(state, "tokens", value, std::numeric_limits<std::size_t>::max(),
                                  request.tokens)) {
                    return false;
                }
                has_tokens = true;
            }
        }
        return has_tokens || state.Fail("tokens", "'tokens' is required.");
    };
    if (!impl_->Walk(body, state, read)) {
        return std::move(state.error);
    }
    return request;
}

}  // namespace rankgate::api

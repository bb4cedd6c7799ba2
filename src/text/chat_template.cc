// SPDX-License-Identifier: Apache-2.0
#include "text/chat_template.h"

#include <simdjson.h>

#include <algorithm>
#include <cstring>
#include <ctime>
#include <set>
#include <utility>

#include "base/utf8.h"
#include "jinja/lexer.h"
#include "jinja/parser.h"
#include "jinja/runtime.h"
#include "text/jinja_support.h"

namespace rankgate::text {
namespace {

namespace dom = simdjson::dom;
namespace support = jinja_support;

// Tokens in one {{ }} or {% %}, unary operators in a row, branches of one if: what the recursive parser and
// tree are deep in.
constexpr int kMaxExpressionTokens = 4096;
constexpr int kMaxUnaryChain = 64;
constexpr int kMaxElifs = 500;
// Stands behind the last message's content while that is left open; the trailing space tells whether the
// template trims.
constexpr std::string_view kOpenEnd = "CONTINUE_FINAL_MESSAGE_TAG ";

Error Bad(std::string text, std::string param = "messages") {
    return Error::Invalid(std::move(param), std::move(text));
}

// Thrown while values are built from JSON; never leaves this file.
struct BadInput {
    Error error;
};

std::string FirstLine(std::string_view text) {
    while (text.starts_with('\n')) {
        text.remove_prefix(1);
    }
    return std::string{text.substr(0, text.find('\n'))};
}

// ---- JSON -> values
// ----------------------------------------------------------------------------------------------------------------

jinja::value Text(std::string_view text, bool trusted) {
    auto out = jinja::mk_val<jinja::value_string>(std::string{text});
    if (!trusted) {
        out->mark_input();
    }
    return out;
}

jinja::value FromJson(dom::element json, int depth) {
    if (depth > kMaxJsonDepth) {
        throw BadInput{Bad("The request is nested too deeply (more than " + std::to_string(kMaxJsonDepth) +
                           " levels).")};
    }
    switch (json.type()) {
        case dom::element_type::NULL_VALUE:
            return jinja::mk_val<jinja::value_none>();
        case dom::element_type::BOOL:
            return jinja::mk_val<jinja::value_bool>(bool{json.get_bool().value_unsafe()});
        case dom::element_type::INT64:
            return jinja::mk_val<jinja::value_int>(json.get_int64().value_unsafe());
        case dom::element_type::UINT64:  // only beyond int64's range
        case dom::element_type::DOUBLE:
            return jinja::mk_val<jinja::value_float>(json.get_double().value_unsafe());
        case dom::element_type::STRING:
            return Text(json.get_string().value_unsafe(), false);
        case dom::element_type::ARRAY: {
            auto out = jinja::mk_val<jinja::value_array>();
            const dom::array items = json.get_array().value_unsafe();
            for (dom::element item : items) {
                out->push_back(FromJson(item, depth + 1));
            }
            return out;
        }
        case dom::element_type::OBJECT: {
            auto out = jinja::mk_val<jinja::value_object>();
            const dom::object fields = json.get_object().value_unsafe();
            for (dom::key_value_pair field : fields) {
                static_cast<jinja::value_t&>(*out).insert(Text(field.key, false),
                                                          FromJson(field.value, depth + 1));
            }
            return out;
        }
    }
    return jinja::mk_val<jinja::value_none>();
}

void Put(const jinja::value_object& object, std::string_view key, const jinja::value& value) {
    // Keys that this file writes are its own; keys that a client chose come through FromJson.
    static_cast<jinja::value_t&>(*object).insert(Text(key, true), value);
}

dom::element Parse(dom::parser& parser, std::string_view json, std::string_view what,
                   dom::element_type want) {
    dom::element root;
    const auto failed = parser.parse(json.data(), json.size(), true).get(root);
    if (failed != simdjson::SUCCESS) {
        throw BadInput{Bad("The " + std::string{what} + " cannot be read as JSON.", std::string{what})};
    }
    if (root.type() != want) {
        throw BadInput{Bad("The " + std::string{what} + " must be " +
                               (want == dom::element_type::ARRAY ? "an array." : "an object."),
                           std::string{what})};
    }
    return root;
}

// OpenAI's arguments are a JSON text; templates walk them as an object, as Hugging Face's and vLLM's callers
// hand them over.
jinja::value ToolArguments(dom::element arguments) {
    std::string_view text;
    if (arguments.get_string().get(text) != simdjson::SUCCESS) {
        return arguments.is_null() ? jinja::mk_val<jinja::value_object>() : FromJson(arguments, 0);
    }
    if (text.find_first_not_of(" \t\r\n") == text.npos) {
        return jinja::mk_val<jinja::value_object>();
    }
    dom::parser parser;
    dom::element root;
    if (parser.parse(text.data(), text.size(), true).get(root) != simdjson::SUCCESS) {
        throw BadInput{Bad("The arguments of a tool call in the messages are not valid JSON.")};
    }
    return FromJson(root, 0);
}

jinja::value ToolCalls(dom::element calls) {
    dom::array array;
    if (calls.get_array().get(array) != simdjson::SUCCESS) {
        throw BadInput{Bad("\"tool_calls\" must be an array.")};
    }
    auto out = jinja::mk_val<jinja::value_array>();
    for (dom::element call : array) {
        dom::object fields;
        if (call.get_object().get(fields) != simdjson::SUCCESS) {
            throw BadInput{Bad("Each entry of \"tool_calls\" must be an object.")};
        }
        auto made = jinja::mk_val<jinja::value_object>();
        for (dom::key_value_pair field : fields) {
            dom::object function;
            if (field.key != "function" || field.value.get_object().get(function) != simdjson::SUCCESS) {
                Put(made, field.key, field.key == "type" ? Text("function", true) : FromJson(field.value, 0));
                continue;
            }
            auto body = jinja::mk_val<jinja::value_object>();
            bool seen = false;
            for (dom::key_value_pair inner : function) {
                const bool arguments = inner.key == "arguments";
                seen = seen || arguments;
                Put(body, inner.key, arguments ? ToolArguments(inner.value) : FromJson(inner.value, 0));
            }
            if (!seen) {
                Put(body, "arguments", jinja::mk_val<jinja::value_object>());
            }
            Put(made, "function", body);
        }
        out->push_back(jinja::value{made});
    }
    return out;
}

bool PartText(dom::element part, std::string_view& text) {
    if (part.get_string().get(text) == simdjson::SUCCESS) {
        return true;
    }
    std::string_view type;
    if (part["type"].get_string().get(type) != simdjson::SUCCESS) {
        return false;
    }
    for (const std::string_view known : {"text", "input_text", "output_text"}) {
        if (type == known) {
            return part["text"].get_string().get(text) == simdjson::SUCCESS;
        }
    }
    return type == "refusal" && part["refusal"].get_string().get(text) == simdjson::SUCCESS;
}

jinja::value TextPart(std::string_view text) {
    auto part = jinja::mk_val<jinja::value_object>();
    Put(part, "type", Text("text", true));
    Put(part, "text", Text(text, false));
    return part;
}

// vLLM's rule: a template that walks through parts always gets parts, any other always gets one string (texts
// joined by a newline).
jinja::value Content(dom::element content, bool as_parts, bool open_end) {
    const std::string tail{open_end ? kOpenEnd : std::string_view{}};
    std::string_view text;
    if (content.get_string().get(text) == simdjson::SUCCESS) {
        const std::string whole = std::string{text} + tail;
        if (!as_parts) {
            return Text(whole, false);
        }
        auto list = jinja::mk_val<jinja::value_array>();
        list->push_back(TextPart(whole));
        return list;
    }
    dom::array parts;
    if (content.get_array().get(parts) != simdjson::SUCCESS) {
        if (!content.is_null()) {
            throw BadInput{Bad("\"content\" must be a string, an array of parts, or null.")};
        }
        if (open_end) {
            throw BadInput{Bad("There is no text to continue in the final message.")};
        }
        return as_parts ? jinja::value{jinja::mk_val<jinja::value_array>()} : Text("", false);
    }
    std::size_t last_text = parts.size();
    std::size_t at = 0;
    for (dom::element part : parts) {
        if (PartText(part, text)) {
            last_text = at;
        }
        ++at;
    }
    if (open_end && last_text == parts.size()) {
        throw BadInput{Bad("There is no text to continue in the final message.")};
    }
    auto list = jinja::mk_val<jinja::value_array>();
    std::string joined;
    at = 0;
    for (dom::element part : parts) {
        const bool is_text = PartText(part, text);
        std::string whole{is_text ? text : std::string_view{}};
        if (at == last_text) {
            whole += tail;
        }
        if (as_parts) {
            list->push_back(is_text ? TextPart(whole) : FromJson(part, 0));
        } else if (!is_text) {
            std::string_view type = "unknown";
            if (part["type"].get_string().get(type) != simdjson::SUCCESS) {
                type = "unknown";
            }
            throw BadInput{Bad("This model's chat template takes text only; content of type \"" +
                               std::string{type} + "\" is not supported.")};
        } else {
            if (at > 0) {
                joined += '\n';
            }
            joined += whole;
        }
        ++at;
    }
    return as_parts ? jinja::value{list} : Text(joined, false);
}

jinja::value Message(dom::element json, bool as_parts, bool knows_developer, bool open_end) {
    dom::object fields;
    if (json.get_object().get(fields) != simdjson::SUCCESS) {
        throw BadInput{Bad("Each message must be an object.")};
    }
    auto out = jinja::mk_val<jinja::value_object>();
    bool has_content = false;
    for (dom::key_value_pair field : fields) {
        if (field.key == "role") {
            std::string_view role;
            if (field.value.get_string().get(role) != simdjson::SUCCESS) {
                throw BadInput{Bad("\"role\" must be a string.")};
            }
            if (role == "developer" && !knows_developer) {
                role = "system";
            }
            // The usual roles are trusted: many templates write a special token around them.
            bool known = false;
            for (const std::string_view name : {"system", "user", "assistant", "tool", "developer"}) {
                known = known || role == name;
            }
            Put(out, "role", Text(role, known));
        } else if (field.key == "content") {
            has_content = true;
            Put(out, "content", Content(field.value, as_parts, open_end));
        } else if (field.value.is_null()) {
            // SDKs replay messages with every unused field null; a template only asks whether it is there.
        } else if (field.key == "tool_calls") {
            Put(out, "tool_calls", ToolCalls(field.value));
        } else {
            static_cast<jinja::value_t&>(*out).insert(Text(field.key, false), FromJson(field.value, 0));
        }
    }
    if (!has_content) {
        if (open_end) {
            throw BadInput{Bad("There is no text to continue in the final message.")};
        }
        Put(out, "content", as_parts ? jinja::value{jinja::mk_val<jinja::value_array>()} : Text("", false));
    }
    return out;
}

// ---- checks at load
// ----------------------------------------------------------------------------------------------------------------

std::size_t LineOf(const std::string& source, std::size_t pos) {
    return 1 + static_cast<std::size_t>(std::count(
                   source.begin(), source.begin() + static_cast<std::ptrdiff_t>(std::min(pos, source.size())),
                   '\n'));
}

// The parser, the tree's destructor and the evaluation recurse; what could take them to the end of the stack
// is refused first.
Status CheckShape(const jinja::lexer_result& lexed) {
    using Token = jinja::token;
    int brackets = 0;
    int blocks = 0;
    int in_expression = 0;
    int unary = 0;
    int elifs = 0;
    const auto fail = [&](const Token& token, const char* what) {
        return Error::Invalid("chat_template", "The chat template has " + std::string{what} + " (line " +
                                                   std::to_string(LineOf(lexed.source, token.pos)) + ").");
    };
    for (std::size_t i = 0; i < lexed.tokens.size(); ++i) {
        const Token& token = lexed.tokens[i];
        ++in_expression;
        unary = token.t == Token::unary_operator || (token.t == Token::identifier && token.value == "not")
                    ? unary + 1
                    : 0;
        switch (token.t) {
            case Token::open_paren:
            case Token::open_square_bracket:
            case Token::open_curly_bracket:
                ++brackets;
                break;
            case Token::close_paren:
            case Token::close_square_bracket:
            case Token::close_curly_bracket:
                --brackets;
                break;
            case Token::open_expression:
                in_expression = brackets = 0;
                break;
            case Token::open_statement: {
                in_expression = brackets = 0;
                const std::string& name =
                    i + 1 < lexed.tokens.size() ? lexed.tokens[i + 1].value : token.value;
                if (name.starts_with("end")) {
                    --blocks;
                    elifs = 0;
                } else if (name == "elif") {
                    ++elifs;
                } else if (name == "if" || name == "for" || name == "macro" || name == "call" ||
                           name == "filter" || name == "set") {
                    // A plain {% set x = y %} opens nothing, but its end comes with the next "endset" or
                    // never: not counted.
                    blocks += name == "set" ? 0 : 1;
                }
                if (name == "endset" || name == "endgeneration") {
                    ++blocks;
                }
                break;
            }
            case Token::text:
                in_expression = 0;
                break;
            default:
                break;
        }
        if (brackets > kMaxTemplateNesting || blocks > kMaxTemplateNesting) {
            return fail(token, "too many nested brackets or blocks");
        }
        if (in_expression > kMaxExpressionTokens) {
            return fail(token, "too long an expression");
        }
        if (unary > kMaxUnaryChain) {
            return fail(token, "too many operators in a row");
        }
        if (elifs > kMaxElifs) {
            return fail(token, "too many branches");
        }
    }
    return {};
}

// Walks every statement and expression of a program; `conditional` = inside some branch.
void Walk(const jinja::statements& body,
          const std::function<void(const jinja::statement&, bool conditional)>& see) {
    int branches = 0;
    jinja::context context;
    context.visitor = [&](bool, const jinja::statement* node,
                          const std::vector<jinja::visitor_pair>& children) {
        see(*node, branches > 0);
        const bool branch = dynamic_cast<const jinja::if_statement*>(node) != nullptr ||
                            dynamic_cast<const jinja::ternary_expression*>(node) != nullptr;
        branches += branch ? 1 : 0;
        for (const auto& [label, nodes] : children) {
            for (const jinja::statement* child : nodes) {
                if (child != nullptr) {
                    child->visit(context);
                }
            }
        }
        branches -= branch ? 1 : 0;
    };
    for (const auto& statement : body) {
        statement->visit(context);
    }
}

template <class T>
const T* As(const jinja::statement* node) {
    return dynamic_cast<const T*>(node);
}

std::string NameOf(const jinja::statement* node) {
    if (const auto* call = As<jinja::call_expression>(node)) {
        node = call->callee.get();
    }
    const auto* identifier = As<jinja::identifier>(node);
    return identifier == nullptr ? std::string{} : identifier->val;
}

std::set<std::string> KnownFilters() {
    std::set<std::string> names{"count", "d", "e", "trim"};
    const jinja::value samples[] = {
        jinja::mk_val<jinja::value_int>(0),      jinja::mk_val<jinja::value_float>(0.0),
        jinja::mk_val<jinja::value_bool>(false), jinja::mk_val<jinja::value_string>(""),
        jinja::mk_val<jinja::value_array>(),     jinja::mk_val<jinja::value_object>(),
        jinja::mk_val<jinja::value_none>(),      jinja::mk_val<jinja::value_undefined>()};
    for (const jinja::value& sample : samples) {
        for (const auto& [name, function] : sample->get_builtins()) {
            names.insert(name);
        }
    }
    return names;
}

// Python's Jinja refuses unknown filters and tests when it compiles, except inside of branches, where it
// waits until one is taken.
Status CheckNames(const jinja::program& program, const std::string& source) {
    static const std::set<std::string> filters = KnownFilters();
    std::string problem;
    Walk(program.body, [&](const jinja::statement& node, bool conditional) {
        if (!problem.empty() || conditional) {
            return;
        }
        std::string name;
        if (const auto* filter = As<jinja::filter_expression>(&node)) {
            name = NameOf(filter->filter.get());
            if (!filters.contains(name)) {
                problem = "uses an unknown filter \"" + name + "\"";
            }
        } else if (const auto* block = As<jinja::filter_statement>(&node)) {
            name = NameOf(block->filter.get());
            if (!filters.contains(name)) {
                problem = "uses an unknown filter \"" + name + "\"";
            }
        } else if (const auto* test = As<jinja::test_expression>(&node)) {
            name = NameOf(test->test.get());
            if (!jinja::global_builtins().contains("test_is_" + name)) {
                problem = "uses an unknown test \"" + name + "\"";
            }
        }
        if (!problem.empty()) {
            problem =
                "The chat template " + problem + " (line " + std::to_string(LineOf(source, node.pos)) + ").";
        }
    });
    if (!problem.empty()) {
        return Error::Invalid("chat_template", problem);
    }
    return {};
}

// {% for part in message.content %} (or ["content"], also behind a filter or a slice): the template walks
// through parts.
bool WalksContent(const jinja::program& program) {
    bool walks = false;
    Walk(program.body, [&](const jinja::statement& node, bool) {
        const auto* loop = As<jinja::for_statement>(&node);
        if (loop == nullptr) {
            return;
        }
        const jinja::statement* over = loop->iterable.get();
        while (true) {
            const auto* member = As<jinja::member_expression>(over);
            if (const auto* select = As<jinja::select_expression>(over)) {
                over = select->lhs.get();
            } else if (const auto* filter = As<jinja::filter_expression>(over)) {
                over = filter->operand.get();
            } else if (member != nullptr && As<jinja::slice_expression>(member->property.get()) != nullptr) {
                over = member->object.get();
            } else {
                break;
            }
        }
        const auto* member = As<jinja::member_expression>(over);
        if (member == nullptr || As<jinja::identifier>(member->object.get()) == nullptr) {
            return;
        }
        const auto* literal = As<jinja::string_literal>(member->property.get());
        walks = walks || (member->computed ? literal != nullptr && literal->val == "content"
                                           : NameOf(member->property.get()) == "content");
    });
    return walks;
}

void TruncatePrompt(RenderedPrompt& prompt, std::size_t size) {
    prompt.text.resize(size);
    std::size_t covered = 0;
    std::size_t keep = 0;
    while (keep < prompt.spans.size() && covered < size) {
        prompt.spans[keep].size = std::min(prompt.spans[keep].size, size - covered);
        covered += prompt.spans[keep].size;
        ++keep;
    }
    prompt.spans.resize(keep);
}

}  // namespace

struct ChatTemplate::Impl {
    std::string source;
    std::shared_ptr<std::string> lexed_source;  // what positions in errors refer to
    jinja::program program;
    TemplateTokens tokens;
    RenderLimits limits;
    bool as_parts{false};
    bool knows_developer{false};
};

ChatTemplate::ChatTemplate(std::unique_ptr<Impl> impl) noexcept : impl_{std::move(impl)} {}
ChatTemplate::~ChatTemplate() = default;
const std::string& ChatTemplate::source() const noexcept {
    return impl_->source;
}
bool ChatTemplate::takes_content_parts() const noexcept {
    return impl_->as_parts;
}

Result<std::shared_ptr<const ChatTemplate>> ChatTemplate::Compile(std::string source, TemplateTokens tokens,
                                                                  RenderLimits limits) {
    if (source.size() > kMaxTemplateBytes) {
        return Error::Invalid("chat_template", "The chat template is longer than " +
                                                   std::to_string(kMaxTemplateBytes) + " bytes.");
    }
    if (!IsValidUtf8(source) || source.find('\0') != source.npos) {
        return Error::Invalid("chat_template", "The chat template is not valid UTF-8 text.");
    }
    const support::Scope scope{support::Budget{}, false};
    auto impl = std::make_unique<Impl>();
    try {
        jinja::lexer lexer;
        const jinja::lexer_result lexed = lexer.tokenize(source);
        Status shape = CheckShape(lexed);
        if (!shape.ok()) {
            return shape.error();
        }
        impl->program = jinja::parse_from_tokens(lexed);
        Status names = CheckNames(impl->program, lexed.source);
        if (!names.ok()) {
            return names.error();
        }
        impl->as_parts = WalksContent(impl->program);
        impl->lexed_source = std::make_shared<std::string>(lexed.source);
    } catch (const support::LimitExceeded& limit) {
        return Error::Invalid("chat_template", std::string{"The chat template "} + limit.what + ".");
    } catch (const std::exception& problem) {
        return Error::Invalid("chat_template",
                              "The chat template cannot be parsed: " + FirstLine(problem.what()));
    }
    impl->knows_developer = source.find("developer") != source.npos;
    impl->source = std::move(source);
    impl->tokens = std::move(tokens);
    impl->limits = limits;
    return std::shared_ptr<const ChatTemplate>{new ChatTemplate{std::move(impl)}};
}

Result<RenderedPrompt> ChatTemplate::Render(const RenderRequest& request) const {
    const RenderLimits& limits = impl_->limits;
    if (request.continue_final_message && request.add_generation_prompt) {
        return Bad("\"continue_final_message\" and \"add_generation_prompt\" cannot both be true.",
                   "continue_final_message");
    }
    const std::size_t input =
        request.messages.size() + request.tools.size() + request.documents.size() + request.kwargs.size();
    if (input > limits.input_bytes) {
        return Bad("The messages are too long for a chat template (" + std::to_string(input) +
                   " bytes, at most " + std::to_string(limits.input_bytes) + ").");
    }
    support::Budget budget;
    budget.steps = limits.steps;
    budget.cpu_ns = limits.cpu_ms * 1'000'000;
    budget.values = limits.values;
    budget.depth = limits.depth;
    budget.bytes += static_cast<std::int64_t>(input) * 32;
    const support::Scope scope{budget, true};  // outlives every value of this render

    RenderedPrompt prompt;
    try {
        dom::parser parser;
        jinja::context context;
        context.src = impl_->lexed_source;
        if (request.now != 0) {
            context.current_time = static_cast<std::time_t>(request.now);
        }
        for (const auto& [name, text] : impl_->tokens) {
            context.set_val(name, Text(text, true));
        }
        const auto optional_list = [&](std::string_view json, const char* name) {
            if (json.empty()) {
                context.set_val(name, jinja::mk_val<jinja::value_none>());
            } else {
                context.set_val(name, FromJson(Parse(parser, json, name, dom::element_type::ARRAY), 0));
            }
        };
        optional_list(request.tools, "tools");
        optional_list(request.documents, "documents");
        context.set_val("add_generation_prompt",
                        jinja::mk_val<jinja::value_bool>(request.add_generation_prompt));
        if (!request.kwargs.empty()) {
            const dom::element kwargs =
                Parse(parser, request.kwargs, "chat_template_kwargs", dom::element_type::OBJECT);
            const dom::object fields = kwargs.get_object().value_unsafe();
            for (dom::key_value_pair field : fields) {
                context.set_val(std::string{field.key}, FromJson(field.value, 0));
            }
        }
        const dom::array messages =
            Parse(parser, request.messages, "messages", dom::element_type::ARRAY).get_array().value_unsafe();
        auto list = jinja::mk_val<jinja::value_array>();
        std::size_t left = 0;
        for (dom::element message : messages) {
            (void)message;
            ++left;
        }
        if (left == 0 && request.continue_final_message) {
            return Bad("There is no message to continue.");
        }
        for (dom::element message : messages) {
            --left;
            list->push_back(Message(message, impl_->as_parts, impl_->knows_developer,
                                    request.continue_final_message && left == 0));
        }
        context.set_val("messages", list);

        jinja::runtime runtime{context};
        const jinja::value_array results = runtime.execute(impl_->program);
        const jinja::value_string parts = jinja::runtime::gather_string_parts(results);
        for (const auto& part : parts->val_str.parts) {
            if (part.val.empty()) {
                continue;
            }
            if (prompt.text.size() + part.val.size() > limits.output_bytes) {
                return Bad("The chat template produces too much text on this request.");
            }
            prompt.text += part.val;
            if (!prompt.spans.empty() && prompt.spans.back().trusted == !part.is_input) {
                prompt.spans.back().size += part.val.size();
            } else {
                prompt.spans.push_back({part.val.size(), !part.is_input});
            }
        }
    } catch (const BadInput& bad) {
        return bad.error;
    } catch (const support::Raised& raised) {
        return Bad(raised.sentence);
    } catch (const support::LimitExceeded& limit) {
        return Bad(std::string{"The chat template "} + limit.what + " on this request.");
    } catch (const std::exception& problem) {
        return Bad("The chat template cannot render this request: " + FirstLine(problem.what()));
    }

    if (request.continue_final_message) {
        const std::string_view tag = kOpenEnd.substr(0, kOpenEnd.size() - 1);
        const std::size_t at = prompt.text.rfind(tag);
        if (at == std::string::npos) {
            return Bad(
                "The chat template does not write the final message as it is, so it cannot be continued.",
                "continue_final_message");
        }
        if (std::string_view{prompt.text}.substr(at).starts_with(kOpenEnd)) {
            TruncatePrompt(prompt, at);
        } else {
            TruncatePrompt(prompt,
                           support::Strip(std::string_view{prompt.text}.substr(0, at), false, true).size());
        }
    }
    return prompt;
}

Status EncodePrompt(const Tokenizer& tokenizer, const RenderedPrompt& prompt, bool untrusted_specials,
                    std::vector<TokenId>& out) {
    if (untrusted_specials) {
        return tokenizer.Encode(prompt.text, {.add_special = false, .parse_special = true}, out);
    }
    std::vector<TextSpan> spans;
    spans.reserve(prompt.spans.size());
    std::string_view rest = prompt.text;
    for (const RenderedPrompt::Span& span : prompt.spans) {
        spans.push_back({rest.substr(0, span.size), span.trusted});
        rest.remove_prefix(span.size);
    }
    return tokenizer.EncodeSegments(spans, false, out);
}

}  // namespace rankgate::text

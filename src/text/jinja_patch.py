#!/usr/bin/env python3
# Copies llama.cpp's template engine into the build tree and patches it (see PATCHES for what and why). Run by cmake/llama.cmake.
# Every patch must match exactly as often as it says; otherwise nothing is written and the configuration stops.
# Usage: jinja_patch.py LLAMA/common OUT
import pathlib
import sys

FILES = ["jinja/lexer.cpp", "jinja/lexer.h", "jinja/parser.cpp", "jinja/parser.h", "jinja/runtime.cpp", "jinja/runtime.h",
         "jinja/string.cpp", "jinja/string.h", "jinja/utils.h", "jinja/value.cpp", "jinja/value.h", "unicode.cpp", "unicode.h"]

L = "::rankgate::text::jinja_support::"

# Filters and methods that Python has and the engine lacks.
RG_FUNCTIONS = r'''
// Python's str() of a value.
static std::string rg_str(const value & v) {
    return v->is_undefined() ? std::string() : v->is_none() ? std::string("None") : v->as_string().str();
}

static value rg_apply(const func_args & args, std::string name, const value & item, size_t extra_from) {
    name = name == "count" ? "length" : name == "d" ? "default" : name == "e" ? "escape" : name == "trim" ? "strip" : name;
    const auto & builtins = item->get_builtins();
    const auto it = builtins.find(name);
    if (it == builtins.end()) {
        throw raised_exception("Unknown filter '" + name + "' for type " + item->type());
    }
    func_args call(args.ctx);
    call.func_name = name;
    call.push_back(item);
    for (size_t i = extra_from; i < args.count(); ++i) {
        call.push_back(args.get_args()[i]);
    }
    return it->second(call);
}

static value rg_map_filter(const func_args & args) {
    auto out = mk_val<value_array>();
    const std::string name = args.get_pos(1)->as_string().str();
    for (const auto & item : args.get_pos(0)->as_array()) {
        out->push_back(rg_apply(args, name, item, 2));
    }
    return out;
}

template <bool is_reject>
static value rg_select(const func_args & args) {
    args.ensure_count(1, 3);
    auto out = mk_val<value_array>();
    for (const auto & item : args.get_pos(0)->as_array()) {
        bool keep;
        if (args.count() == 1) {
            keep = item->as_bool();
        } else {
            const auto & tests = global_builtins();
            const auto it = tests.find("test_is_" + args.get_pos(1)->as_string().str());
            if (it == tests.end()) {
                throw raised_exception("Unknown test '" + args.get_pos(1)->as_string().str() + "'");
            }
            func_args call(args.ctx);
            call.push_back(item);
            if (args.count() > 2) {
                call.push_back(args.get_pos(2));
            }
            keep = it->second(call)->as_bool();
        }
        if (keep != is_reject) {
            out->push_back(item);
        }
    }
    return out;
}

static value rg_sum(const func_args & args) {
    value attribute = args.get_kwarg_or_pos("attribute", 1);
    value none = mk_val<value_undefined>();
    double total = 0;
    bool floating = false;
    for (const auto & item : args.get_pos(0)->as_array()) {
        const value one = attribute->is_undefined() ? item : get_attribute(item, attribute, none);
        floating = floating || is_val<value_float>(one);
        total += one->as_float();
    }
    if (floating) {
        return mk_val<value_float>(total);
    }
    return mk_val<value_int>(static_cast<int64_t>(total));
}

static value rg_unique(const func_args & args) {
    auto out = mk_val<value_array>();
    for (const auto & item : args.get_pos(0)->as_array()) {
        bool seen = false;
        for (const auto & old : out->as_array()) {
            ::rankgate::text::jinja_support::Step();
            seen = seen || *old == *item;
        }
        if (!seen) {
            out->push_back(item);
        }
    }
    return out;
}

static value rg_string_list(const func_args & args) {
    auto out = mk_val<value_array>();
    for (const auto & c : ::rankgate::text::jinja_support::CodePoints(args.get_pos(0)->as_string().str())) {
        out->push_back(rg_derived(c, args.get_pos(0)->rg_has_input()));
    }
    return out;
}

// ','.join(list) as a method, 'abc' | join(',') as a filter.
static value rg_string_join(const func_args & args) {
    func_args call(args.ctx);
    if (args.count() > 1 && is_val<value_array>(args.get_pos(1))) {
        call.push_back(args.get_pos(1));
        call.push_back(args.get_pos(0));
    } else {
        call.push_back(rg_string_list(args));
        for (size_t i = 1; i < args.count(); ++i) {
            call.push_back(args.get_args()[i]);
        }
    }
    return call.get_pos(0)->get_builtins().at("join")(call);
}

static value rg_splitlines(const func_args & args) {
    auto out = mk_val<value_array>();
    const std::string text = args.get_pos(0)->as_string().str();
    const bool input = args.get_pos(0)->rg_has_input();
    size_t from = 0;
    while (from < text.size()) {
        const size_t end = std::min(text.find_first_of("\r\n", from), text.size());
        out->push_back(rg_derived(text.substr(from, end - from), input));
        from = end + 1 + (end + 1 < text.size() && text[end] == '\r' && text[end + 1] == '\n' ? 1 : 0);
    }
    return out;
}

template <bool must, bool last>
static value rg_find(const func_args & args) {
    const std::string text = args.get_pos(0)->as_string().str();
    const std::string part = args.get_pos(1)->as_string().str();
    const size_t at = last ? text.rfind(part) : text.find(part);
    if (at == std::string::npos) {
        if (must) {
            throw raised_exception("substring not found");
        }
        return mk_val<value_int>(-1);
    }
    return mk_val<value_int>(static_cast<int64_t>(::rankgate::text::jinja_support::CountCodePoints(text.substr(0, at))));
}

static value rg_str_count(const func_args & args) {
    const std::string text = args.get_pos(0)->as_string().str();
    const std::string part = args.get_pos(1)->as_string().str();
    int64_t found = 0;
    if (part.empty()) {
        return mk_val<value_int>(static_cast<int64_t>(::rankgate::text::jinja_support::CountCodePoints(text)) + 1);
    }
    for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + part.size())) {
        ++found;
    }
    return mk_val<value_int>(found);
}

template <int (*is)(int)>
static value rg_all(const func_args & args) {
    const std::string text = args.get_pos(0)->as_string().str();
    return mk_val<value_bool>(!text.empty() && std::all_of(text.begin(), text.end(), [](unsigned char c) { return is(c) != 0; }));
}

template <bool prefix>
static value rg_remove(const func_args & args) {
    std::string text = args.get_pos(0)->as_string().str();
    const std::string part = args.get_pos(1)->as_string().str();
    if (text.size() >= part.size() && text.compare(prefix ? 0 : text.size() - part.size(), part.size(), part) == 0) {
        text.erase(prefix ? 0 : text.size() - part.size(), part.size());
    }
    return rg_derived(text, args.get_pos(0)->rg_has_input());
}

static value rg_escape(const func_args & args) {
    std::string out;
    for (const char c : args.get_pos(0)->as_string().str()) {
        switch (c) {
            case '&': out += "&amp;"; break;
            case '<': out += "&lt;"; break;
            case '>': out += "&gt;"; break;
            case '\'': out += "&#39;"; break;
            case '"': out += "&#34;"; break;
            default: out += c;
        }
    }
    return rg_derived(out, args.get_pos(0)->rg_has_input());
}

static value rg_wordcount(const func_args & args) {
    return mk_val<value_int>(static_cast<int64_t>(::rankgate::text::jinja_support::SplitWhitespace(args.get_pos(0)->as_string().str(), -1).size()));
}

#define RG_STRING_METHODS                                                                                                        \
    {"join", rg_string_join}, {"list", rg_string_list}, {"splitlines", rg_splitlines}, {"find", rg_find<false, false>},          \
    {"rfind", rg_find<false, true>}, {"index", rg_find<true, false>}, {"count", rg_str_count}, {"isdigit", rg_all<std::isdigit>}, \
    {"isspace", rg_all<std::isspace>}, {"removeprefix", rg_remove<true>}, {"removesuffix", rg_remove<false>},                    \
    {"escape", rg_escape}, {"wordcount", rg_wordcount},

'''


# (file, times, old, new)
PATCHES = [
    # --- no JSON library: our own code builds the values --------------------------------------------------------------------------
    ("jinja/value.cpp", 1, "// for converting from JSON to jinja values\n#include \"json.h\"\n", ""),

    # --- limits -------------------------------------------------------------------------------------------------------------------
    ("jinja/utils.h", 1, "#include <string>\n", "#include <string>\n#include \"text/jinja_support.h\"\n"),
    ("jinja/runtime.cpp", 1, "value statement::execute(context & ctx) const {\n",
     f"value statement::execute(context & ctx) const {{\n    {L}Depth rg_depth;\n    {L}Step();\n"),
    # Every value counts; and they die iteratively: a list nested 100 000 deep must not be torn down by recursion.
    ("jinja/value.h", 1, "    value_t() = default;\n    value_t(const value_t &) = default;\n    virtual ~value_t() = default;\n",
     "    value_t() = default;\n"
     "    ~value_t() override { rg_release(val_arr, val_obj); }\n"
     "    void DropChildren() noexcept override {\n"
     "        const func_handler func = std::move(val_func);\n"
     "        val_func = nullptr;\n"
     "        rg_release(val_arr, val_obj); // last: it may delete this value\n"
     "    }\n"
     "    static void rg_release(std::vector<value> & arr, std::vector<std::pair<value, value>> & obj) noexcept;\n"
     "    bool rg_has_input() const; // some text in it came from the client\n"),
    ("jinja/value.h", 1, "struct value_t {\n    int64_t val_int;\n", f"struct value_t : public {L}Tracked {{\n    int64_t val_int;\n"),
    ("jinja/value.cpp", 1, "// func_args method implementations\n", """\
void value_t::rg_release(std::vector<value> & arr, std::vector<std::pair<value, value>> & obj) noexcept {
    if (arr.empty() && obj.empty()) {
        return;
    }
    static thread_local std::vector<value> pending;
    static thread_local bool draining = false;
    for (auto & item : arr) {
        pending.push_back(std::move(item));
    }
    arr.clear();
    for (auto & pair : obj) {
        pending.push_back(std::move(pair.first));
        pending.push_back(std::move(pair.second));
    }
    obj.clear();
    if (draining) {
        return;
    }
    draining = true;
    while (!pending.empty()) {
        value last = std::move(pending.back());
        pending.pop_back();
        last.reset();
    }
    draining = false;
}

bool value_t::rg_has_input() const {
    rg::Depth depth;
    rg::Step();
    for (const auto & part : val_str.parts) {
        if (part.is_input) {
            return true;
        }
    }
    for (const auto & item : val_arr) {
        if (item->rg_has_input()) {
            return true;
        }
    }
    for (const auto & pair : val_obj) {
        if (pair.first->rg_has_input() || pair.second->rg_has_input()) {
            return true;
        }
    }
    return false;
}

// A string that is as trusted as what it was made of.
static value_string rg_derived(const std::string & text, bool is_input) {
    auto out = mk_val<value_string>(text);
    if (is_input) {
        out->mark_input();
    }
    return out;
}

// func_args method implementations
""".replace("rg::", L)),
    ("jinja/value.h", 1, "    value_string_t(const std::string & v) { val_str = string(v); }\n    value_string_t(const string & v) { val_str = v; }\n",
     f"    value_string_t(const std::string & v) {{ {L}Charge(v.size()); val_str = string(v); }}\n"
     f"    value_string_t(const string & v) {{ for (const auto & p : v.parts) {L}Charge(p.val.size() + 48); val_str = v; }}\n"),
    ("jinja/value.h", 1, "    virtual bool is_hashable() const override {\n        if (std::all_of(val_arr",
     f"    virtual bool is_hashable() const override {{\n        {L}Depth rg_depth; {L}Step();\n        if (std::all_of(val_arr"),
    ("jinja/string.cpp", 1, "string & string::append(const string & other) {\n    for (const auto & part : other.parts) {\n",
     f"string & string::append(const string & other) {{\n    {L}Step();\n    for (const auto & part : other.parts) {{\n        {L}Charge(part.val.size() + 48);\n"),
    ("jinja/runtime.h", 1, "static void gather_string_parts_recursive(const value & val, value_string & parts) {\n"
     "    // TODO: probably allow print value_none as \"None\" string? currently this breaks some templates\n",
     # What is printed for each kind of value is Python's str(); lists only stand for themselves at the top, where they are a block's parts.
     "static void gather_string_parts_recursive(const value & val, value_string & parts, bool top = true) {\n"
     f"    {L}Step();\n"),
    ("jinja/runtime.h", 1, "    } else if (is_val<value_array>(val)) {\n        auto items = cast_val<value_array>(val)->as_array();\n"
     "        for (const auto & item : items) {\n            gather_string_parts_recursive(item, parts);\n        }\n    }\n}\n",
     "    } else if (top && is_val<value_array>(val)) {\n        const auto & items = cast_val<value_array>(val)->as_array();\n"
     "        for (const auto & item : items) {\n            gather_string_parts_recursive(item, parts, false);\n        }\n"
     "    } else if (val->is_none()) {\n        parts->val_str.append(std::string(\"None\"));\n"
     "    } else if (is_val<value_array>(val) || is_val<value_object>(val)) {\n"
     "        string text = val->as_string();\n        if (val->rg_has_input()) text.mark_input();\n        parts->val_str.append(text);\n    }\n}\n"),
    ("jinja/value.cpp", 1, "static void value_to_json_internal(std::ostringstream & oss, const value & val, int curr_lvl, int indent, const std::string_view item_sep, const std::string_view key_sep) {\n",
     "static void value_to_json_internal(std::ostringstream & oss, const value & val, int curr_lvl, int indent, const std::string_view item_sep, const std::string_view key_sep) {\n"
     f"    {L}Depth rg_depth;\n    {L}Step();\n    {L}Charge(item_sep.size() + key_sep.size() + static_cast<size_t>(indent > 0 ? indent * (curr_lvl + 1) : 0));\n"
     f"    if (is_val<value_string>(val)) {{ {L}Charge(val->val_str.length()); }}\n"),
    ("jinja/value.cpp", 1, "        indent = static_cast<int>(val_indent->as_int());\n",
     "        if (val_indent->as_int() > 64) throw raised_exception(\"tojson: indent is too wide\");\n"
     "        indent = static_cast<int>(std::max<int64_t>(val_indent->as_int(), 0));\n"),
    ("jinja/value.cpp", 1, "                indent.assign(val_width->as_int(), ' ');\n",
     "                if (val_width->as_int() > 1000) throw raised_exception(\"indent: width is too wide\");\n"
     "                indent.assign(static_cast<size_t>(std::max<int64_t>(val_width->as_int(), 0)), ' ');\n"),
    ("jinja/value.cpp", 1, "            while (std::getline(iss, line)) {\n",
     f"            while (std::getline(iss, line)) {{\n                {L}Step(); {L}Charge(line.size() + indent.size());\n"),
    ("jinja/value.cpp", 1, "                result += val_arr->as_string().str();\n",
     f"                const std::string rg_item = val_arr->as_string().str();\n                {L}Step(); {L}Charge(rg_item.size() + delim.size());\n"
     "                result += rg_item;\n"),
    ("jinja/value.cpp", 1, "                    new_res.reserve(str.length() + new_str.length() * (str.length() + 1));\n",
     f"                    if (count >= 0) throw not_implemented_exception(\"replace of the empty string with a count\");\n"
     f"                    for (size_t rg_i = 0; rg_i <= str.length(); ++rg_i) {L}Charge(new_str.length() + 1);\n"
     "                    new_res.reserve(str.length() + new_str.length() * (str.length() + 1));\n"),
    ("jinja/value.cpp", 1, "                    while ((pos = str.find(old_str, pos)) != std::string::npos) {\n"
     "                        str.replace(pos, old_str.length(), new_str);\n                        pos += new_str.length();\n                    }\n",
     "                    std::string rg_out;\n                    size_t rg_last = 0;\n"
     "                    while (count != 0 && (pos = str.find(old_str, rg_last)) != std::string::npos) {\n"
     f"                        {L}Step(); {L}Charge(new_str.size());\n"
     "                        rg_out.append(str, rg_last, pos - rg_last);\n                        rg_out += new_str;\n"
     "                        rg_last = pos + old_str.length();\n                        --count;\n                    }\n"
     "                    rg_out.append(str, rg_last);\n                    str = std::move(rg_out);\n"),
    ("jinja/value.cpp", 1, "            if (count > 0) {\n                throw not_implemented_exception(\"String replace with count argument not implemented\");\n            }\n", ""),
    ("jinja/value.cpp", 1, "            while ((pos = str.find(delim)) != std::string::npos && maxsplit != 0) {\n"
     "                token = str.substr(0, pos);\n                result->push_back(mk_val<value_string>(token));\n"
     "                str.erase(0, pos + delim.length());\n                --maxsplit;\n            }\n",
     "            size_t rg_last = 0;\n"
     "            while (maxsplit != 0 && (pos = str.find(delim, rg_last)) != std::string::npos) {\n"
     "                token = str.substr(rg_last, pos - rg_last);\n                result->push_back(rg_derived(token, val_input->rg_has_input()));\n"
     "                rg_last = pos + delim.length();\n                --maxsplit;\n            }\n            str.erase(0, rg_last);\n"),
    ("jinja/value.cpp", 1, "                token = str.substr(pos + delim.length());\n                result->push_back(mk_val<value_string>(token));\n",
     "                token = str.substr(pos + delim.length());\n                result->push_back(rg_derived(token, val_input->rg_has_input()));\n"),
    ("jinja/value.cpp", 1, "    for (int64_t i = start_val; direction * i < direction * stop_val; i += step) {\n",
     "    step = std::clamp(step, -(len + 1), len + 1);\n    for (int64_t i = start_val; direction * i < direction * stop_val; i += step) {\n"),
    ("jinja/value.cpp", 1, "            bool res = args.get_pos(0)->val_int % args.get_pos(1)->val_int == 0;\n",
     "            if (args.get_pos(1)->val_int == 0 || args.get_pos(1)->val_int == -1) throw raised_exception(\"integer modulo by zero\");\n"
     "            bool res = args.get_pos(0)->val_int % args.get_pos(1)->val_int == 0;\n"),
    # An order that is none (numbers among strings) makes std::sort read outside of the list; a merge sort cannot. Python's is stable too.
    ("jinja/value.cpp", 2, "            std::sort(", "            std::stable_sort("),
    ("jinja/value.cpp", 1, "                for (int64_t i = start; i < stop; i += step) {\n                    out->push_back(",
     "                for (int64_t i = start; i < stop; i = i > INT64_MAX - step ? INT64_MAX : i + step) {\n                    out->push_back("),
    ("jinja/value.cpp", 1, "                for (int64_t i = start; i > stop; i += step) {\n                    out->push_back(",
     "                for (int64_t i = start; i > stop; i = i < INT64_MIN - step ? INT64_MIN : i + step) {\n                    out->push_back("),

    # --- speed: these copied a map of all functions at every look-up -----------------------------------------------------------------
    ("jinja/runtime.cpp", 1, "    auto builtins = global_builtins();\n", "    const auto & builtins = global_builtins();\n"),
    ("jinja/runtime.cpp", 1, "    auto builtins = input->get_builtins();\n", "    const auto & builtins = input->get_builtins();\n"),

    # --- trust: what is made of a client's text is a client's text ---------------------------------------------------------------------
    ("jinja/string.cpp", 1, "bool string::all_parts_are_input() const {\n    for (const auto & part : parts) {\n        if (!part.is_input) {\n"
     "            return false;\n        }\n    }\n    return true;\n}\n",
     "// any of them: a derived string cannot tell its parts apart any more, so it is as little trusted as its least trusted part\n"
     "bool string::all_parts_are_input() const {\n    for (const auto & part : parts) {\n        if (part.is_input) {\n"
     "            return true;\n        }\n    }\n    return false;\n}\n"),
    ("jinja/value.cpp", 1, "        json_str = json_ensure_ascii_preserving_format(json_str);\n    }\n    return mk_val<value_string>(json_str);\n",
     "        json_str = json_ensure_ascii_preserving_format(json_str);\n    }\n    return rg_derived(json_str, args.get_pos(0)->rg_has_input());\n"),
    ("jinja/value.cpp", 1, "            return mk_val<value_string>(result);\n        }},\n        {\"string\", [](const func_args & args) -> value {\n            args.ensure_vals<value_array>();\n",
     "            return rg_derived(result, args.get_pos(0)->rg_has_input() || val_delim->rg_has_input());\n        }},\n        {\"string\", [](const func_args & args) -> value {\n            args.ensure_vals<value_array>();\n"),
    ("jinja/value.cpp", 1, "            return mk_val<value_string>(args.get_pos(0)->as_string());\n        }},\n        {\"length\"",
     "            return rg_derived(args.get_pos(0)->as_string().str(), args.get_pos(0)->rg_has_input());\n        }},\n        {\"length\""),
    ("jinja/value.cpp", 1, "            return mk_val<value_string>(args.get_pos(0)->as_string());\n        }},\n        {\"tojson\"",
     "            return rg_derived(args.get_pos(0)->as_string().str(), args.get_pos(0)->rg_has_input());\n        }},\n        {\"tojson\""),

    # --- raise_exception: the sentence, nothing around it ------------------------------------------------------------------------------
    ("jinja/value.cpp", 1, "            throw raised_exception(\"Jinja Exception: \" + msg);\n", f"            throw {L}Raised{{msg}};\n"),
    # --- load errors name their line -----------------------------------------------------------------------------------------------------
    ("jinja/utils.h", 1, "    oss << tag << \": \" << msg << \"\\n\";\n",
     "    oss << msg << \" (line \" << 1 + std::count(source.begin(), source.begin() + static_cast<std::ptrdiff_t>(std::min(pos, source.size())), '\\n') << \")\\n\";\n"),
    ("jinja/parser.cpp", 1, "        while (current < tokens.size()) {\n            body.push_back(parse_any());\n        }\n",
     "        while (current < tokens.size()) {\n            try {\n                body.push_back(parse_any());\n"
     "            } catch (const parser_exception &) {\n                throw;\n            } catch (const std::exception & e) {\n"
     "                throw parser_exception(e.what(), source, tokens[std::min(current, tokens.size() - 1)].pos);\n            }\n        }\n"),
    # Runtime errors: one line, not a drawing.
    ("jinja/runtime.cpp", 1, "            oss << \"\\n------------\\n\";\n            oss << \"While executing \" << type() << \" at \" << get_line_col(source, pos) << \" in source:\\n\";\n"
     "            oss << peak_source(source, pos) << \"\\n\";\n            oss << \"Error: \" << e.what();\n",
     "            oss << e.what() << \" (\" << get_line_col(source, pos) << \" of the chat template)\";\n"),

    # --- Python's results where the engine's differ ----------------------------------------------------------------------------------------
    ("jinja/value.h", 1, "        std::string out = std::to_string(val_flt);\n        out.erase(out.find_last_not_of('0') + 1, std::string::npos); // remove trailing zeros\n"
     "        if (out.back() == '.') out.push_back('0'); // leave one zero if no decimals\n        return out;\n",
     f"        return string({L}FloatRepr(val_flt));\n"),
    ("jinja/value.cpp", 1, "        oss << val->as_float();\n", f"        oss << {L}FloatRepr(val->as_float());\n"),
    ("jinja/value.cpp", 1, "        const std::string val_str = val->as_string().str();\n\n        if (val_str.find('\\'') != std::string::npos) {\n"
     "            return value_to_json(val);\n        } else {\n            return \"'\" + val_str + \"'\";\n        }\n    } else {\n",
     f"        {L}Charge(val->val_str.length());\n        return {L}StringRepr(val->as_string().str());\n    }} else {{\n        {L}Depth rg_depth; {L}Step();\n"),
    ("jinja/runtime.cpp", 1, "            JJ_DEBUG(\"Division operation: %f / %f\", a, b);\n",
     "            if (b == 0) throw std::runtime_error(\"division by zero\");\n"),
    ("jinja/runtime.cpp", 1, "            double rem = std::fmod(a, b);\n",
     "            if (b == 0) throw std::runtime_error(\"integer modulo by zero\");\n            double rem = std::fmod(a, b);\n"
     "            if (rem != 0 && (rem < 0) != (b < 0)) rem += b;\n"),
    ("jinja/runtime.cpp", 1, "    // Handle undefined and null values\n    if (is_val<value_undefined>(left_val)",
     "    if (op.value == \"~\") {\n"
     "        auto rg_text = [](const value & v) -> string {\n"
     "            if (is_val<value_string>(v)) return v->val_str;\n"
     "            if (v->is_undefined()) return string();\n"
     "            string text = v->is_none() ? string(std::string(\"None\")) : v->as_string();\n"
     "            if (v->rg_has_input()) text.mark_input();\n            return text;\n        };\n"
     "        string rg_out = rg_text(left_val);\n        rg_out.append(rg_text(right_val));\n        return mk_val<value_string>(rg_out);\n    }\n"
     "    if (op.value == \"+\") {\n"
     "        auto rg_name = [](const value & v) -> std::string { return v->is_none() ? \"NoneType\" : is_val<value_string>(v) ? \"str\" : v->type(); };\n"
     "        for (const auto & rg_side : {left_val, right_val}) {\n"
     "            if (rg_side->is_undefined()) {\n                auto * rg_undef = cast_val<value_undefined>(rg_side);\n"
     "                throw std::runtime_error(\"'\" + rg_undef->hint + \"' is undefined\");\n            }\n        }\n"
     "        if (is_val<value_string>(left_val) != is_val<value_string>(right_val)) {\n"
     "            throw std::runtime_error(\"cannot add \" + rg_name(left_val) + \" and \" + rg_name(right_val));\n        }\n    }\n"
     "    if (is_val<value_string>(left_val) && is_val<value_string>(right_val) && (op.value[0] == '<' || op.value[0] == '>')) {\n"
     "        const int rg_order = left_val->as_string().str().compare(right_val->as_string().str());\n"
     "        return mk_val<value_bool>(op.value == \"<\" ? rg_order < 0 : op.value == \">\" ? rg_order > 0 : op.value == \"<=\" ? rg_order <= 0 : rg_order >= 0);\n    }\n"
     "    // Handle undefined and null values\n    if (is_val<value_undefined>(left_val)"),
    ("jinja/runtime.cpp", 1, "        value val = try_builtin_func(ctx, prop, object, true);\n        if (!is_val<value_undefined>(val)) {\n            return val;\n        }\n",
     "        if (rg_is_method(object, prop)) {\n            value val = try_builtin_func(ctx, prop, object, true);\n"
     "            if (!is_val<value_undefined>(val)) {\n                return val;\n            }\n        }\n"),
    ("jinja/runtime.cpp", 1, "value member_expression::execute_impl(context & ctx) const {\n",
     "static bool rg_is_method(const value & object, const std::string & name) {\n"
     f"    return is_val<value_object>(object)   ? {L}IsDictMethod(name)\n"
     f"           : is_val<value_array>(object)  ? {L}IsListMethod(name)\n"
     f"           : is_val<value_string>(object) ? {L}IsStrMethod(name)\n"
     "                                          : false;\n}\n\n"
     "value member_expression::execute_impl(context & ctx) const {\n"),
    ("jinja/runtime.cpp", 1, "        if (is_val<value_undefined>(val)) {\n            val = try_builtin_func(ctx, key, object, true);\n        }\n",
     "        if (is_val<value_undefined>(val) && rg_is_method(object, key)) {\n            val = try_builtin_func(ctx, key, object, true);\n        }\n"),
    ("jinja/runtime.cpp", 1, "            val = try_builtin_func(ctx, key, object, true);\n\n        }\n    } else {\n",
     "            if (rg_is_method(object, key)) {\n                val = try_builtin_func(ctx, key, object, true);\n            }\n\n        }\n    } else {\n"),
    ("jinja/runtime.cpp", 1, "        auto key = property->as_string().str();\n        val = try_builtin_func(ctx, key, object, true);\n    }\n", "    }\n"),
    ("jinja/runtime.cpp", 1, "        JJ_DEBUG(\"%s\", \"Accessing property on undefined object, returning undefined\");\n        return val;\n",
     "        throw std::runtime_error(\"'\" + cast_val<value_undefined>(object)->hint + \"' is undefined\");\n"),
    ("jinja/runtime.cpp", 1, "    value val = mk_val<value_undefined>(\"object_property\");\n",
     "    value val;\n"),
    ("jinja/runtime.cpp", 1, "        JJ_DEBUG(\"%s\", \"Member expression property is undefined, returning undefined\");\n        return val;\n",
     "        return mk_val<value_undefined>(\"element\");\n"),
    ("jinja/runtime.cpp", 1, "    if (ctx.is_get_stats && val && object && property) {\n",
     "    if (!val) {\n        val = mk_val<value_undefined>(is_val<value_string>(property) ? property->as_string().str() : std::string(\"element\"));\n    }\n"
     "    if (ctx.is_get_stats && val && object && property) {\n"),
    ("jinja/runtime.cpp", 1, "                auto str = object->as_string().str();\n                if (index >= 0 && index < static_cast<int64_t>(str.size())) {\n"
     "                    val = mk_val<value_string>(std::string(1, str[index]));\n                }\n",
     f"                const auto str = {L}CodePoints(object->as_string().str());\n"
     "                if (index < 0) {\n                    index += static_cast<int64_t>(str.size());\n                }\n"
     "                if (index >= 0 && index < static_cast<int64_t>(str.size())) {\n"
     "                    auto rg_char = mk_val<value_string>(str[static_cast<size_t>(index)]);\n"
     "                    rg_char->val_str.mark_input_based_on(object->val_str);\n                    val = rg_char;\n                }\n"),
    # Lengths and slices of strings count characters.
    ("jinja/string.cpp", 1, "        len += part.val.length();\n", f"        len += {L}CountCodePoints(part.val);\n"),
    ("jinja/value.cpp", 1, "            auto sliced = slice(input->as_string().str(), start, stop, step);\n",
     f"            std::string sliced;\n            for (const auto & rg_c : slice({L}CodePoints(input->as_string().str()), start, stop, step)) sliced += rg_c;\n"),
    ("jinja/value.h", 1, "        return val_str.length() > 0;\n",
     "        for (const auto & part : val_str.parts) if (!part.val.empty()) return true;\n        return false;\n"),
    # str.strip() and str.split() know Unicode's white space.
    ("jinja/string.cpp", 1, "        size_t start = 0;\n        size_t end = s.length();\n        auto match_char",
     f"        if (!chars) return {L}Strip(s, left, right);\n        size_t start = 0;\n        size_t end = s.length();\n        auto match_char"),
    ("jinja/value.cpp", 1, "                throw raised_exception(\"split() first argument must be a string\");\n            }\n            std::string str = val_input->as_string().str();\n",
     "                throw raised_exception(\"split() first argument must be a string\");\n            }\n            std::string str = val_input->as_string().str();\n"
     "            if (args.count() == 1 || args.get_pos(1)->is_none()) {\n                auto rg_words = mk_val<value_array>();\n"
     f"                for (const auto & rg_word : {L}SplitWhitespace(str, args.count() > 2 ? args.get_pos(2)->as_int() : -1)) {{\n"
     "                    rg_words->push_back(rg_derived(rg_word, val_input->rg_has_input()));\n                }\n                return rg_words;\n            }\n"),
    # Only undefined has a default; None is a value.
    ("jinja/value.cpp", 1, "        : (args.get_pos(0)->is_undefined() || args.get_pos(0)->is_none());\n", "        : args.get_pos(0)->is_undefined();\n"),
    # Unknown escapes stay as they are, \uXXXX and \xXX are read.
    ("jinja/lexer.cpp", 1, "                if (escape_chars.find(escaped_char) == escape_chars.end()) {\n"
     "                    throw lexer_exception(std::string(\"unknown escape character \\\\\") + escaped_char, source, pos);\n                }\n",
     "            if (escaped_char == 'u' || escaped_char == 'x') {\n                const size_t rg_digits = escaped_char == 'u' ? 4 : 2;\n"
     "                const std::string rg_hex = src.substr(pos, rg_digits);\n"
     "                if (rg_hex.size() != rg_digits || rg_hex.find_first_not_of(\"0123456789abcdefABCDEF\") != std::string::npos) {\n"
     "                    throw lexer_exception(\"truncated escape\", source, pos);\n                }\n"
     f"                {L}AppendUtf8(str, static_cast<uint32_t>(std::stoul(rg_hex, nullptr, 16)));\n                pos += rg_digits;\n                continue;\n            }}\n"
     "            if (escape_chars.find(escaped_char) == escape_chars.end()) {\n                str += '\\\\';\n                str += escaped_char;\n                continue;\n            }\n"),

    # A tree of the wrong shape is a load error with its line, also where assertions are compiled out.
    ("jinja/runtime.h", 1, "    assert(dynamic_cast<T *>(ptr.get()) != nullptr);\n",
     "    if (dynamic_cast<T *>(ptr.get()) == nullptr) throw std::runtime_error(\"unexpected \" + ptr->type());\n"),
    ("jinja/runtime.h", 1, "    assert(dynamic_cast<T *>(ptr.get()) != nullptr || dynamic_cast<U *>(ptr.get()) != nullptr);\n",
     "    if (dynamic_cast<T *>(ptr.get()) == nullptr && dynamic_cast<U *>(ptr.get()) == nullptr) throw std::runtime_error(\"unexpected \" + ptr->type());\n"),
    ("jinja/parser.cpp", 1, "        assert(start_pos < tokens.size());\n",
     "        if (start_pos >= tokens.size()) throw std::runtime_error(\"unexpected end of the template\");\n"),
    ("jinja/runtime.cpp", 1, "        for (int64_t i = 0; i < repeat; ++i) {\n            res->val_str.append(str);\n        }\n",
     "        size_t rg_size = 0;\n        for (const auto & part : str.parts) rg_size += part.val.size();\n        if (rg_size == 0) return res;\n"
     f"        {L}Charge(static_cast<size_t>(repeat) > (size_t{{1}} << 40) / rg_size ? size_t{{1}} << 40 : rg_size * static_cast<size_t>(repeat));\n"
     "        std::string rg_text;\n        for (int64_t i = 0; i < repeat; ++i) {\n            for (const auto & part : str.parts) rg_text += part.val;\n        }\n"
     "        res->val_str = string(rg_text, str.all_parts_are_input());\n"),
    # lstrip_blocks: the first character of a template was taken for white space.
    ("jinja/lexer.cpp", 1, "                    if (current == 1) {\n                        end = 0; // Trim from the start of the string\n                        break;\n                    }\n", ""),
    ("jinja/lexer.cpp", 1, "                        break; // Found non-whitespace before newline, keep\n                    }\n",
     "                        break; // Found non-whitespace before newline, keep\n                    }\n"
     "                    if (current == 1) {\n                        end = 0; // Trim from the start of the string\n                        break;\n                    }\n"),
    ("jinja/lexer.cpp", 1, "            num += \".\" + frac;\n        }\n",
     "            num += \".\" + frac;\n        }\n"
     "        if (pos + 1 < src.size() && !num.empty() && (src[pos] == 'e' || src[pos] == 'E')) {\n"
     "            const size_t rg_sign = src[pos + 1] == '+' || src[pos + 1] == '-' ? 1 : 0;\n"
     "            if (pos + 1 + rg_sign < src.size() && is_integer(src[pos + 1 + rg_sign])) {\n"
     "                num += src.substr(pos, 1 + rg_sign);\n                pos += 1 + rg_sign;\n                num += consume_while(is_integer);\n            }\n        }\n"),
    ("jinja/parser.cpp", 1, "                if (t.value.find('.') != std::string::npos) {\n", "                if (t.value.find_first_of(\".eE\") != std::string::npos) {\n"),
    ("jinja/lexer.h", 1, "        {\"*\", token::multiplicative_binary_operator},\n        {\"/\", token::multiplicative_binary_operator},\n",
     "        {\"**\", token::multiplicative_binary_operator},\n        {\"//\", token::multiplicative_binary_operator},\n"
     "        {\"*\", token::multiplicative_binary_operator},\n        {\"/\", token::multiplicative_binary_operator},\n"),
    ("jinja/runtime.cpp", 1, "        } else if (op.value == \"/\") {\n",
     "        } else if (op.value == \"//\" || op.value == \"**\") {\n"
     "            if (op.value == \"//\" && b == 0) throw std::runtime_error(\"integer division by zero\");\n"
     "            double res = op.value == \"//\" ? std::floor(a / b) : std::pow(a, b);\n"
     "            bool is_float = is_val<value_float>(left_val) || is_val<value_float>(right_val) || (op.value == \"**\" && b < 0) || std::fabs(res) > 9e18;\n"
     "            if (is_float) return mk_val<value_float>(res);\n            return mk_val<value_int>(static_cast<int64_t>(res));\n"
     "        } else if (op.value == \"/\") {\n"),
    # (1,) is a tuple.
    ("jinja/parser.cpp", 1, "            ++current; // consume comma\n            exprs.push_back(primary ?",
     "            ++current; // consume comma\n            if (is(token::close_paren) || is(token::close_statement)) break;\n            exprs.push_back(primary ?"),
    ("jinja/runtime.cpp", 1, "    if (!is_val<value_array>(iterable_val) && !is_val<value_object>(iterable_val)) {\n        throw std::runtime_error(\"Expected iterable",
     "    if (is_val<value_string>(iterable_val)) {\n        auto rg_chars = mk_val<value_array>();\n"
     f"        for (const auto & rg_c : {L}CodePoints(iterable_val->as_string().str())) {{\n"
     "            auto rg_char = mk_val<value_string>(rg_c);\n            rg_char->val_str.mark_input_based_on(iterable_val->val_str);\n            rg_chars->push_back(value(rg_char));\n        }\n"
     "        iterable_val = rg_chars;\n    }\n"
     "    if (!is_val<value_array>(iterable_val) && !is_val<value_object>(iterable_val)) {\n        throw std::runtime_error(\"Expected iterable"),
    ("jinja/runtime.cpp", 1, "        scope.set_val(\"loop\", loop_obj);\n",
     "        loop_obj->insert(\"cycle\", mk_val<value_func>(\"cycle\", [i](const func_args & args) -> value {\n"
     "            args.ensure_count(1);\n            return args.get_pos(i % args.count());\n        }));\n"
     "        scope.set_val(\"loop\", loop_obj);\n"),
    ("jinja/value.cpp", 1, "        {\"test_is_number\", test_type_fn<value_int, value_float>},\n", "        {\"test_is_number\", test_type_fn<value_int, value_float, value_bool>},\n"),
    ("jinja/value.cpp", 1, "                return mk_val<value_int>(std::stoi(str, nullptr, base));\n",
     f"                const std::string rg_digits = {L}Strip(str, true, true);\n                size_t rg_read = 0;\n"
     "                const long long rg_int = std::stoll(rg_digits, &rg_read, base);\n"
     "                if (rg_read == rg_digits.size()) return mk_val<value_int>(rg_int);\n"
     "                rg_read = 0;\n                const double rg_float = base == 10 ? std::stod(rg_digits, &rg_read) : 0;\n"
     "                if (rg_read == rg_digits.size() && rg_read > 0) return mk_val<value_int>(static_cast<int64_t>(rg_float));\n"
     "                throw std::invalid_argument(\"int\");\n"),
    ("jinja/value.cpp", 1, "    if (val_sort->as_bool()) { // undefined == false\n        throw not_implemented_exception(\"tojson sort_keys=true not implemented\");\n    }\n",
 "    struct rg_sorted { rg_sorted(bool on) { rg_sort_keys = on; } ~rg_sorted() { rg_sort_keys = false; } } rg_scope(val_sort->as_bool());\n"),
    ("jinja/value.cpp", 1, "static value tojson(const func_args & args) {\n", "static thread_local bool rg_sort_keys = false;\n\nstatic value tojson(const func_args & args) {\n"),
    ("jinja/value.cpp", 1, "        const auto & obj = val->as_ordered_object(); // IMPORTANT: need to keep exact order\n",
     "        auto obj = val->as_ordered_object(); // IMPORTANT: need to keep exact order\n"
     "        if (rg_sort_keys) {\n            std::stable_sort(obj.begin(), obj.end(), [](const auto & a, const auto & b) { return a.first->as_string().str() < b.first->as_string().str(); });\n        }\n"),
    ("jinja/value.cpp", 1, "                if (!is_val<value_string>(val_arr) && !is_val<value_int>(val_arr) && !is_val<value_float>(val_arr)) {\n"
     "                    throw raised_exception(\"join() can only join arrays of strings or numerics\");\n                }\n", ""),
    ("jinja/value.cpp", 1, "                const std::string rg_item = val_arr->as_string().str();\n", "                const std::string rg_item = rg_str(val_arr);\n"),
    ("jinja/value.cpp", 1, "            if (!is_val<value_kwarg>(args.get_args().at(1))) {\n                throw not_implemented_exception(\"map: filter-mapping not implemented\");\n            }\n",
     "            if (!is_val<value_kwarg>(args.get_args().at(1))) {\n                return rg_map_filter(args);\n            }\n"),
    ("jinja/value.cpp", 1, "        {\"select\", selectattr<false>},\n", "        {\"select\", rg_select<false>},\n"),
    ("jinja/value.cpp", 1, "        {\"reject\", selectattr<true>},\n", "        {\"reject\", rg_select<true>},\n        {\"sum\", rg_sum},\n"),
    ("jinja/value.cpp", 1, "        {\"unique\", array_unique_not_implemented},\n", "        {\"unique\", rg_unique},\n"),
    ("jinja/value.cpp", 1, "[[noreturn]] static value array_unique_not_implemented(const func_args &) {\n    throw not_implemented_exception(\"Array unique builtin not implemented\");\n}\n", ""),
    ("jinja/value.cpp", 1, "        {\"join\", string_join_not_implemented},\n", "        RG_STRING_METHODS\n"),
    ("jinja/value.cpp", 1, "[[noreturn]] static value string_join_not_implemented(const func_args &) {\n    throw not_implemented_exception(\"String join builtin not implemented\");\n}\n", ""),
    ("jinja/value.cpp", 1, "        {\"join\", object_join_not_implemented},\n",
     "        {\"list\", [](const func_args & args) -> value { return global_builtins().at(\"rg_keys\")(args); }},\n"
     "        {\"join\", [](const func_args & args) -> value {\n            func_args rg_args(args.ctx);\n            rg_args.push_back(global_builtins().at(\"rg_keys\")(args));\n"
     "            for (size_t i = 1; i < args.count(); ++i) rg_args.push_back(args.get_args()[i]);\n            return rg_args.get_pos(0)->get_builtins().at(\"join\")(rg_args);\n        }},\n"),
    ("jinja/value.cpp", 1, "[[noreturn]] static value object_join_not_implemented(const func_args &) {\n    throw not_implemented_exception(\"object join not implemented\");\n}\n", ""),
    ("jinja/value.cpp", 1, "        {\"tojson\", tojson},\n\n        // tests\n",
     "        {\"tojson\", tojson},\n        {\"rg_keys\", [](const func_args & args) -> value {\n            auto out = mk_val<value_array>();\n"
     "            for (const auto & pair : args.get_pos(0)->as_ordered_object()) out->push_back(pair.first);\n            return out;\n        }},\n\n        // tests\n"),
    ("jinja/value.cpp", 1, "            return mk_val<value_int>(val < 0 ? -val : val);\n        }},\n",
     "            return mk_val<value_int>(val < 0 && val != INT64_MIN ? -val : val);\n        }},\n"
     "        {\"round\", [](const func_args & args) -> value { return mk_val<value_float>(static_cast<double>(args.get_pos(0)->as_int())); }},\n"),
    ("jinja/value.cpp", 1, "            return mk_val<value_float>(val < 0.0 ? -val : val);\n        }},\n",
     "            return mk_val<value_float>(val < 0.0 ? -val : val);\n        }},\n"
     "        {\"round\", [](const func_args & args) -> value {\n            value rg_digits = args.get_kwarg_or_pos(\"precision\", 1);\n"
     "            const double rg_scale = std::pow(10.0, rg_digits->is_undefined() ? 0.0 : static_cast<double>(std::clamp<int64_t>(rg_digits->as_int(), 0, 15)));\n"
     "            return mk_val<value_float>(std::nearbyint(args.get_pos(0)->as_float() * rg_scale) / rg_scale);\n        }},\n"),
    ("jinja/value.cpp", 1, "const func_builtins & global_builtins() {\n", RG_FUNCTIONS + "const func_builtins & global_builtins() {\n"),

    # --- speed ---------------------------------------------------------------------------------------------------------------------
    # Kinds are a bit test, not a dynamic_cast (a tuple is an array too).
    ("jinja/value.h", 1, "bool is_val(const value & ptr) {\n    using PointeeType = typename extract_pointee<T>::type;\n    return dynamic_cast<const PointeeType*>(ptr.get()) != nullptr;\n",
     "bool is_val(const value & ptr) {\n    using PointeeType = typename extract_pointee<T>::type;\n    return ptr && (rg_kind_of(ptr.get()) & PointeeType::kRg) != 0;\n"),
    ("jinja/value.h", 1, "// Helper to check the type of a value\n", "template<typename V> unsigned rg_kind_of(const V * ptr) { return ptr->rg_kind(); }\n\n// Helper to check the type of a value\n"),
    ("jinja/value.h", 1, "bool is_val(const value_t * ptr) {\n    using PointeeType = typename extract_pointee<T>::type;\n    return dynamic_cast<const PointeeType*>(ptr) != nullptr;\n",
     "bool is_val(const value_t * ptr) {\n    using PointeeType = typename extract_pointee<T>::type;\n    return ptr && (rg_kind_of(ptr) & PointeeType::kRg) != 0;\n"),
    ("jinja/value.h", 1, "const typename extract_pointee<T>::type * cast_val(const value & ptr) {\n    using PointeeType = typename extract_pointee<T>::type;\n    return dynamic_cast<const PointeeType*>(ptr.get());\n",
     "const typename extract_pointee<T>::type * cast_val(const value & ptr) {\n    using PointeeType = typename extract_pointee<T>::type;\n    return is_val<T>(ptr) ? static_cast<const PointeeType*>(ptr.get()) : nullptr;\n"),
    ("jinja/value.h", 1, "typename extract_pointee<T>::type * cast_val(value & ptr) {\n    using PointeeType = typename extract_pointee<T>::type;\n    return dynamic_cast<PointeeType*>(ptr.get());\n",
     "typename extract_pointee<T>::type * cast_val(value & ptr) {\n    using PointeeType = typename extract_pointee<T>::type;\n    return is_val<T>(ptr) ? static_cast<PointeeType*>(ptr.get()) : nullptr;\n"),
    ("jinja/value.h", 1, "    // Note: only for debugging and error reporting purposes\n    virtual std::string type() const { return \"\"; }\n",
     "    virtual unsigned rg_kind() const { return 0; }\n    // Note: only for debugging and error reporting purposes\n    virtual std::string type() const { return \"\"; }\n"),
    ("jinja/value.h", 1, "    virtual std::string type() const override { return \"Integer\"; }\n",
     "    static constexpr unsigned kRg = 1;\n    virtual unsigned rg_kind() const override { return kRg; }\n    virtual std::string type() const override { return \"Integer\"; }\n"),
    ("jinja/value.h", 1, "    virtual std::string type() const override { return \"Float\"; }\n",
     "    static constexpr unsigned kRg = 2;\n    virtual unsigned rg_kind() const override { return kRg; }\n    virtual std::string type() const override { return \"Float\"; }\n"),
    ("jinja/value.h", 1, "    virtual std::string type() const override { return \"String\"; }\n",
     "    static constexpr unsigned kRg = 4;\n    virtual unsigned rg_kind() const override { return kRg; }\n    virtual std::string type() const override { return \"String\"; }\n"),
    ("jinja/value.h", 1, "    virtual std::string type() const override { return \"Boolean\"; }\n",
     "    static constexpr unsigned kRg = 8;\n    virtual unsigned rg_kind() const override { return kRg; }\n    virtual std::string type() const override { return \"Boolean\"; }\n"),
    ("jinja/value.h", 1, "    virtual std::string type() const override { return \"Array\"; }\n",
     "    static constexpr unsigned kRg = 16;\n    virtual unsigned rg_kind() const override { return kRg; }\n    virtual std::string type() const override { return \"Array\"; }\n"),
    ("jinja/value.h", 1, "    virtual std::string type() const override { return \"None\"; }\n",
     "    static constexpr unsigned kRg = 128;\n    virtual unsigned rg_kind() const override { return kRg; }\n    virtual std::string type() const override { return \"None\"; }\n"),
    ("jinja/value.h", 1, "    virtual std::string type() const override { return \"KwArg\"; }\n",
     "    static constexpr unsigned kRg = 512;\n    virtual unsigned rg_kind() const override { return kRg; }\n    virtual std::string type() const override { return \"KwArg\"; }\n"),
    ("jinja/value.h", 1, "    virtual std::string type() const override { return \"Tuple\"; }\n",
     "    static constexpr unsigned kRg = 32;\n    virtual unsigned rg_kind() const override { return kRg | value_array_t::kRg; }\n    virtual std::string type() const override { return \"Tuple\"; }\n"),
    ("jinja/value.h", 1, "    virtual std::string type() const override { return \"Function\"; }\n",
     "    static constexpr unsigned kRg = 1024;\n    virtual unsigned rg_kind() const override { return kRg; }\n    virtual std::string type() const override { return \"Function\"; }\n"),
    ("jinja/value.h", 1, "    std::string hint; // for debugging",
     "    static constexpr unsigned kRg = 256;\n    virtual unsigned rg_kind() const override { return kRg; }\n    std::string hint; // for debugging"),
    # dictsort gives pairs.
    ("jinja/value.cpp", 1, "                    return value_compare(a.first, b.first, reverse ? value_compare_op::gt : value_compare_op::lt);\n                }\n            });\n            return result;\n",
     "                    return value_compare(a.first, b.first, reverse ? value_compare_op::gt : value_compare_op::lt);\n                }\n            });\n            auto rg_pairs = mk_val<value_array>();\n"
     "            for (const auto & pair : result->val_obj) rg_pairs->push_back(value(mk_val<value_tuple>(pair)));\n            return rg_pairs;\n"),
    # Equal strings, hashes and numbers without copies or inner values.
    ("jinja/value.h", 1, "        return typeid(*this) == typeid(other) && val_str.str() == other.val_str.str();\n",
     "        if (other.rg_kind() != kRg) return false;\n"
     "        if (val_str.parts.size() == 1 && other.val_str.parts.size() == 1) return val_str.parts[0].val == other.val_str.parts[0].val;\n"
     "        return val_str.str() == other.val_str.str();\n"),
    ("jinja/value.h", 1, "        val_flt = static_cast<double>(v);\n        val = mk_val<value_int>(val_int);\n", "        val_flt = static_cast<double>(v);\n"),
    ("jinja/value.h", 1, "struct value_bool_t : public value_t {\n    value val;\n", "struct value_bool_t : public value_t {\n"),
    ("jinja/value.h", 1, "    virtual hasher unique_hash() const noexcept override {\n        return val->unique_hash();\n    }\n",
     "    virtual hasher unique_hash() const noexcept override {\n        return hasher(typeid(value_int_t)).update(&val_int, sizeof(val_int)).update(&val_flt, sizeof(val_flt));\n    }\n"),
    ("jinja/value.h", 1, "            return val->unique_hash();\n        } else {\n", "            return hasher(typeid(value_int_t)).update(&val_int, sizeof(val_int)).update(&val_flt, sizeof(val_flt));\n        } else {\n"),
    ("jinja/value.h", 1, "struct value_float_t : public value_t {\n    value val;\n", "struct value_float_t : public value_t {\n"),
    ("jinja/value.h", 1, "        val_int = std::isfinite(v) ? static_cast<int64_t>(v) : 0;\n        val = mk_val<value_int>(val_int);\n", "        val_int = std::isfinite(v) && std::fabs(v) < 9.2e18 ? static_cast<int64_t>(v) : 0;\n"),
    ("jinja/value.h", 1, "        std::set<std::string> ops;\n", "        struct { void insert(const char *) {} void insert(const std::string &) {} } ops; // not collected here\n"),
    ("jinja/string.h", 1, "        parts.push_back({user_input, v});\n", "        parts.emplace_back(string_part{user_input, v});\n"),
    # Lists of anything can be equal, not only lists of hashable values.
    ("jinja/value.h", 1, "        return typeid(*this) == typeid(other) && is_hashable() && other.is_hashable() && std::equal(val_arr.begin(), val_arr.end(), other.val_arr.begin(), other.val_arr.end(), value_equivalence());\n",
     f"        {L}Depth rg_depth; {L}Step();\n"
     "        return typeid(*this) == typeid(other) && std::equal(val_arr.begin(), val_arr.end(), other.val_arr.begin(), other.val_arr.end(), value_equivalence());\n"),
    # {% if -1 in l %}: a minus behind a keyword is a sign.
    ("jinja/lexer.cpp", 1, "            switch (last_token_type) {\n                case token::identifier:\n",
     "            if (last_token_type == token::identifier) {\n"
     "                for (const char * rg_word : {\"if\", \"elif\", \"else\", \"in\", \"and\", \"or\", \"not\", \"is\"}) {\n"
     "                    if (tokens.back().value == rg_word) last_token_type = token::comma;\n                }\n            }\n"
     "            switch (last_token_type) {\n                case token::identifier:\n"),
    # Comparisons and copies of long strings count as work, so that the clock is looked at often enough.
    ("jinja/value.h", 1, "    virtual bool operator==(const value_t & other) const { return equivalent(other); }\n",
     f"    virtual bool operator==(const value_t & other) const {{ {L}Step(); return equivalent(other); }}\n"),
    ("jinja/value.cpp", 1, "bool value_compare(const value & a, const value & b, value_compare_op op) {\n",
     f"bool value_compare(const value & a, const value & b, value_compare_op op) {{\n    {L}Step();\n"),
    ("jinja/value.h", 1, "    virtual string as_string() const override { return val_str; }\n",
     f"    virtual string as_string() const override {{ for (const auto & p : val_str.parts) {L}Work(p.val.size()); return val_str; }}\n"),
    ("jinja/string.cpp", 1, "std::string string::str() const {\n",
     f"std::string string::str() const {{\n    for (const auto & p : parts) {L}Work(p.val.size());\n"),
    # Literals and names are made once.
    ("jinja/runtime.h", 1, "    std::string val;\n    explicit string_literal(const std::string & val) : val(val) {}\n", "    std::string val;\n    value rg_value;\n    explicit string_literal(const std::string & val) : val(val), rg_value(mk_val<value_string>(val)) {}\n"),
    ("jinja/runtime.h", 1, "        return mk_val<value_string>(val);\n", "        return rg_value;\n"),
    ("jinja/runtime.h", 1, "    std::string val;\n    explicit identifier(const std::string & val) : val(val) {}\n", "    std::string val;\n    value rg_value;\n    explicit identifier(const std::string & val) : val(val), rg_value(mk_val<value_string>(val)) {}\n"),
    ("jinja/runtime.cpp", 1, "    if (!it->is_undefined()) {\n        if (ctx.is_get_stats) {\n", "    if (it && !it->is_undefined()) {\n        if (ctx.is_get_stats) {\n"),
    ("jinja/runtime.cpp", 1, "        property = mk_val<value_string>(cast_stmt<identifier>(this->property)->val);\n        std::string prop = property->as_string().str();\n",
     "        property = cast_stmt<identifier>(this->property)->rg_value;\n        const std::string & prop = cast_stmt<identifier>(this->property)->val;\n"),
    ("jinja/runtime.cpp", 1, "        auto key = property->as_string().str();\n        val = object->at(property, val);\n", "        value rg_missing;\n        val = object->at(property, rg_missing);\n        if (!val) {\n            val = mk_val<value_undefined>(property->as_string().str());\n        } else {\n            return val;\n        }\n        auto key = property->as_string().str();\n"),
    ("jinja/runtime.cpp", 1, "        value_object loop_obj = mk_val<value_object>();\n        loop_obj->has_builtins = false; // loop object has no builtins\n",
     "        value_object loop_obj = mk_val<value_object>();\n        loop_obj->val_obj.reserve(10);\n        loop_obj->has_builtins = false; // loop object has no builtins\n"),
    ("jinja/runtime.cpp", 1, "        loop_obj->insert(\"index\", ", "        loop_obj->val_obj.emplace_back(rg_key(\"index\"), "),
    ("jinja/runtime.cpp", 1, "        loop_obj->insert(\"index0\", ", "        loop_obj->val_obj.emplace_back(rg_key(\"index0\"), "),
    ("jinja/runtime.cpp", 1, "        loop_obj->insert(\"revindex\", ", "        loop_obj->val_obj.emplace_back(rg_key(\"revindex\"), "),
    ("jinja/runtime.cpp", 1, "        loop_obj->insert(\"revindex0\", ", "        loop_obj->val_obj.emplace_back(rg_key(\"revindex0\"), "),
    ("jinja/runtime.cpp", 1, "        loop_obj->insert(\"first\", ", "        loop_obj->val_obj.emplace_back(rg_key(\"first\"), "),
    ("jinja/runtime.cpp", 1, "        loop_obj->insert(\"last\", ", "        loop_obj->val_obj.emplace_back(rg_key(\"last\"), "),
    ("jinja/runtime.cpp", 1, "        loop_obj->insert(\"length\", ", "        loop_obj->val_obj.emplace_back(rg_key(\"length\"), "),
    ("jinja/runtime.cpp", 1, "        loop_obj->insert(\"previtem\", ", "        loop_obj->val_obj.emplace_back(rg_key(\"previtem\"), "),
    ("jinja/runtime.cpp", 1, "        loop_obj->insert(\"nextitem\", ", "        loop_obj->val_obj.emplace_back(rg_key(\"nextitem\"), "),
    ("jinja/runtime.cpp", 1, "value for_statement::execute_impl(context & ctx) const {\n",
     "// the keys of every loop object\nstatic const value & rg_key(const char * name) {\n"
     "    static const std::map<std::string, value> keys = [] {\n        std::map<std::string, value> made;\n"
     "        for (const char * key : {\"index\", \"index0\", \"revindex\", \"revindex0\", \"first\", \"last\", \"length\", \"previtem\", \"nextitem\"}) {\n"
     "            made.emplace(key, mk_val<value_string>(std::string(key)));\n        }\n        return made;\n    }();\n    return keys.at(name);\n}\n\n"
     "value for_statement::execute_impl(context & ctx) const {\n"),
]

# (file, from, up to but without, instead): whole passages. Each mark must be there exactly once.
CUTS = [
    # A scope is a small list of names and a link to the scope around it; the original copied every variable for each loop and macro.
    ("jinja/runtime.h", "struct context {\n", "// utils for visiting AST nodes\n", """\
struct context {
    std::shared_ptr<std::string> src; // for debugging; use shared_ptr to avoid copying on scope creation
    std::time_t current_time; // for functions that need current time

    bool is_get_stats = false; // whether to collect stats

    visitor_fn visitor;

    // src is optional, used for error reporting
    context(std::string src = "") : src(std::make_shared<std::string>(std::move(src))), scope(std::make_shared<frame>()) {
        current_time = std::time(nullptr);
    }
    ~context() = default;

    context(const context & parent) : src(parent.src), current_time(parent.current_time), is_get_stats(parent.is_get_stats), scope(std::make_shared<frame>()) {
        scope->up = parent.scope;
    }

    value get_val(const std::string & name) {
        for (const frame * f = scope.get(); f != nullptr; f = f->up.get()) {
            for (const auto & var : f->vars) {
                if (var.first == name) {
                    return var.second;
                }
            }
        }
        // shared by all: immutable, and made before any budget counts
        static const value yes = mk_val<value_bool>(true);
        static const value no = mk_val<value_bool>(false);
        static const value none = mk_val<value_none>();
        if (name == "true" || name == "True") return yes;
        if (name == "false" || name == "False") return no;
        if (name == "none" || name == "None") return none;
        return value();
    }

    void set_val(const std::string & name, const value & val) {
        for (auto & var : scope->vars) {
            if (var.first == name) {
                var.second = val;
                return;
            }
        }
        scope->vars.emplace_back(name, val);
    }

    void set_val(const value & name, const value & val) {
        set_val(name->as_string().str(), val);
    }

private:
    struct frame {
        std::vector<std::pair<std::string, value>> vars;
        std::shared_ptr<frame> up;
    };
    std::shared_ptr<frame> scope;
};

"""),
    # Small objects are lists; only large ones have an index.
    ("jinja/value.h", "struct value_object_t : public value_t {\n", "using value_object = std::shared_ptr<value_object_t>;\n", """\
struct value_object_t : public value_t {
    static constexpr unsigned kRg = 64;
    virtual unsigned rg_kind() const override { return kRg; }
    static constexpr size_t kIndexFrom = 24;
    std::unordered_map<value, size_t, value_hasher, value_equivalence> index; // key -> place; empty while there are few
    bool has_builtins = true; // loop objects do not have builtins
    value_object_t() = default;
    value_object_t(value & v) {
        for (const auto & pair : v->val_obj) {
            insert(pair.first, pair.second);
        }
    }
    value_object_t(const std::map<value, value> & obj) {
        for (const auto & pair : obj) {
            insert(pair.first, pair.second);
        }
    }
    value_object_t(const std::vector<std::pair<value, value>> & obj) {
        for (const auto & pair : obj) {
            insert(pair.first, pair.second);
        }
    }
    void insert(const std::string & key, const value & val) {
        insert(mk_val<value_string>(key), val);
    }
    virtual std::string type() const override { return "Object"; }
    virtual bool is_immutable() const override { return false; }
    virtual const std::vector<std::pair<value, value>> & as_ordered_object() const override { return val_obj; }
    virtual string as_string() const override {
        std::ostringstream ss;
        ss << "{";
        for (size_t i = 0; i < val_obj.size(); i++) {
            if (i > 0) ss << ", ";
            auto & [key, val] = val_obj.at(i);
            ss << value_to_string_repr(key) << ": " << value_to_string_repr(val);
        }
        ss << "}";
        return ss.str();
    }
    virtual bool as_bool() const override {
        return !val_obj.empty();
    }
    size_t find(const value & key) const {
        if (!key->is_immutable() || !key->is_hashable()) {
            throw std::runtime_error("Object key of unhashable type: " + key->type());
        }
        if (index.empty()) {
            for (size_t i = 0; i < val_obj.size(); ++i) {
                if (*val_obj[i].first == *key) {
                    return i;
                }
            }
            return val_obj.size();
        }
        const auto it = index.find(key);
        return it == index.end() ? val_obj.size() : it->second;
    }
    virtual bool has_key(const value & key) override {
        return find(key) < val_obj.size();
    }
    virtual void insert(const value & key, const value & val) override {
        const size_t place = find(key);
        if (place < val_obj.size()) {
            val_obj[place].second = val;
            return;
        }
        val_obj.push_back({key, val});
        if (val_obj.size() == kIndexFrom) {
            for (size_t i = 0; i < val_obj.size(); ++i) {
                index.emplace(val_obj[i].first, i);
            }
        } else if (val_obj.size() > kIndexFrom) {
            index.emplace(key, place);
        }
    }
    virtual value & at(const value & key, value & default_val) override {
        const size_t place = find(key);
        return place < val_obj.size() ? val_obj[place].second : default_val;
    }
    virtual value & at(const value & key) override {
        const size_t place = find(key);
        if (place == val_obj.size()) {
            throw std::runtime_error("Key '" + key->as_string().str() + "' not found in value of type " + type());
        }
        return val_obj[place].second;
    }
    virtual value & at(const std::string & key, value & default_val) override {
        value key_val = mk_val<value_string>(key);
        return at(key_val, default_val);
    }
    virtual value & at(const std::string & key) override {
        value key_val = mk_val<value_string>(key);
        return at(key_val);
    }
    virtual const func_builtins & get_builtins() const override;
    virtual bool is_hashable() const override {
        RG::Depth rg_depth; RG::Step();
        if (std::all_of(val_obj.begin(), val_obj.end(), [&](auto & pair) -> bool {
            const auto & val = pair.second;
            return val->is_immutable() && val->is_hashable();
        })) {
            return true;
        }
        return false;
    }
    virtual hasher unique_hash() const noexcept override {
        auto hash = hasher(typeid(*this));
        for (const auto & [key, val] : val_obj) {
            // must use digest to prevent problems from "concatenation" property of hasher
            // for ex. hash of key="ab", value="c" should be different from key="a", value="bc"
            const size_t key_hash = key->unique_hash().digest();
            const size_t val_hash = val->unique_hash().digest();
            hash.update(&key_hash, sizeof(key_hash));
            hash.update(&val_hash, sizeof(val_hash));
        }
        return hash;
    }
protected:
    virtual bool equivalent(const value_t & other) const override {
        RG::Depth rg_depth; RG::Step();
        if (other.rg_kind() != kRg || val_obj.size() != other.val_obj.size()) return false;
        const auto & rg_other = static_cast<const value_object_t &>(other);
        return std::all_of(val_obj.begin(), val_obj.end(), [&](const auto & pair) {
            const size_t place = rg_other.find(pair.first);
            return place < val_obj.size() && *pair.second == *rg_other.val_obj[place].second;
        });
    }
};
""".replace("RG::", L)),
    # Macro arguments: by position, by name, by default, else undefined.
    ("jinja/runtime.cpp", "static inline void bind_parameters(", "value macro_statement::execute_impl(", """\
static inline void bind_parameters(const std::string & name, const statements & this_args, const func_args & args, context & ctx) {
    size_t positional = 0;
    while (positional < args.count() && !is_val<value_kwarg>(args.get_args()[positional])) {
        ++positional;
    }
    if (positional > this_args.size()) {
        throw std::runtime_error("macro '" + name + "' takes not more than " + std::to_string(this_args.size()) + " argument(s)");
    }
    for (size_t i = 0; i < this_args.size(); ++i) {
        const auto kwarg = cast_stmt<keyword_argument_expression>(this_args[i]);
        const auto id = cast_stmt<identifier>(kwarg ? kwarg->key : this_args[i]);
        if (!id) {
            throw std::runtime_error("Invalid parameter type in '" + name + "'");
        }
        value bound = i < positional ? args.get_args()[i] : args.get_kwarg(id->val, value());
        if (!bound) {
            bound = kwarg ? kwarg->val->execute(ctx) : value(mk_val<value_undefined>(id->val));
        }
        ctx.set_val(id->val, bound);
    }
}

"""),
    ("jinja/value.cpp", "static value from_json(const common_json & j", "// compare operator for value_t\n", ""),
    ("jinja/value.cpp", "template<>\nvoid global_from_json(", "// recursively convert value to JSON string\n", ""),
]


def main():
    src, out = (pathlib.Path(a) for a in sys.argv[1:3])
    text = {name: (src / name).read_text() for name in FILES if (src / name).exists()}
    missing = [name for name in FILES if name not in text]
    wrong = []
    for name, begin, end, instead in CUTS:
        body = text.get(name, "")
        if body.count(begin) != 1 or body.count(end) != 1 or body.index(begin) > body.index(end):
            wrong.append(f"{name}: cannot cut from {begin.splitlines()[0]!r}")
            continue
        text[name] = body[:body.index(begin)] + instead + body[body.index(end):]
    for name, times, old, new in PATCHES:
        found = text.get(name, "").count(old)
        if found != times:
            wrong.append(f"{name}: expected {times} times, found {found}: {old.strip().splitlines()[0] if old.strip() else old!r}")
        text[name] = text.get(name, "").replace(old, new)
    if missing or wrong:
        for line in [f"{name}: missing" for name in missing] + wrong:
            print("jinja_patch:", line, file=sys.stderr)
        return 1
    for name, content in text.items():
        path = out / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_text() != content:  # keep the time stamp, so that nothing is compiled for nothing
            path.write_text(content)
    return 0


if __name__ == "__main__":
    sys.exit(main())

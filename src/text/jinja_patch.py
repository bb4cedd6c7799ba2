#!/usr/bin/env python3
# Copies llama.cpp's template engine into the build tree and patches it (see PATCHES for what and why). Run by cmake/llama.cmake.
# Every patch must match exactly as often as it says; otherwise nothing is written and the configuration stops.
# Usage: jinja_patch.py LLAMA/common OUT
import pathlib
import sys

FILES = ["jinja/lexer.cpp", "jinja/lexer.h", "jinja/parser.cpp", "jinja/parser.h", "jinja/runtime.cpp", "jinja/runtime.h",
         "jinja/string.cpp", "jinja/string.h", "jinja/utils.h", "jinja/value.cpp", "jinja/value.h", "unicode.cpp", "unicode.h"]

L = "::rankgate::text::jinja_support::"

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
     f"    value_t() {{ {L}ValueBorn(); }}\n"
     "    value_t(const value_t &) = delete;\n"
     "    virtual ~value_t() { rg_release(val_arr, val_obj); " + L + "ValueDied(); }\n"
     "    static void rg_release(std::vector<value> & arr, std::vector<std::pair<value, value>> & obj) noexcept;\n"
     "    bool rg_has_input() const; // some text in it came from the client\n"),
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
    ("jinja/value.h", 2, "    virtual bool is_hashable() const override {\n        if (std::all_of(",
     f"    virtual bool is_hashable() const override {{\n        {L}Depth rg_depth; {L}Step();\n        if (std::all_of("),
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
     "    value val = mk_val<value_undefined>(is_val<value_string>(property) ? property->as_string().str() : std::string(\"element\"));\n"),
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
]

# (file, from, up to but without): passages that are left out. Each mark must be there exactly once.
CUTS = [
    ("jinja/value.cpp", "static value from_json(const common_json & j", "// compare operator for value_t\n"),
    ("jinja/value.cpp", "template<>\nvoid global_from_json(", "// recursively convert value to JSON string\n"),
]


def main():
    src, out = (pathlib.Path(a) for a in sys.argv[1:3])
    text = {name: (src / name).read_text() for name in FILES if (src / name).exists()}
    missing = [name for name in FILES if name not in text]
    wrong = []
    for name, begin, end in CUTS:
        body = text.get(name, "")
        if body.count(begin) != 1 or body.count(end) != 1 or body.index(begin) > body.index(end):
            wrong.append(f"{name}: cannot cut from {begin.splitlines()[0]!r}")
            continue
        text[name] = body[:body.index(begin)] + body[body.index(end):]
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

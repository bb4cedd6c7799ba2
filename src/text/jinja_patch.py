#!/usr/bin/env python3
# Copies llama.cpp's template engine into the build tree and patches it (see PATCHES for what and why). Run by cmake/llama.cmake.
# Every patch must match exactly as often as it says; otherwise nothing is written and the configuration stops.
# Usage: jinja_patch.py LLAMA/common OUT
import pathlib
import sys

FILES = ["jinja/lexer.cpp", "jinja/lexer.h", "jinja/parser.cpp", "jinja/parser.h", "jinja/runtime.cpp", "jinja/runtime.h",
         "jinja/string.cpp", "jinja/string.h", "jinja/utils.h", "jinja/value.cpp", "jinja/value.h", "unicode.cpp", "unicode.h"]

L = "::rankgate::text::jinja_limits::"

# (file, times, old, new)
PATCHES = [
    # --- no JSON library: our own code builds the values --------------------------------------------------------------------------
    ("jinja/value.cpp", 1, "// for converting from JSON to jinja values\n#include \"json.h\"\n", ""),
    # --- limits -------------------------------------------------------------------------------------------------------------------
    ("jinja/utils.h", 1, "#include <string>\n", "#include <string>\n#include \"text/jinja_limits.h\"\n"),
    ("jinja/runtime.cpp", 1, "value statement::execute(context & ctx) const {\n",
     f"value statement::execute(context & ctx) const {{\n    {L}Depth rg_depth;\n    {L}Step();\n"),
    # Values count; and they die iteratively: a list nested 100 000 deep must not be torn down by recursion.
    ("jinja/value.h", 1, "    value_t() = default;\n    value_t(const value_t &) = default;\n    virtual ~value_t() = default;\n",
     f"    value_t() {{ {L}ValueBorn(); }}\n"
     "    value_t(const value_t &) = delete;\n"
     "    virtual ~value_t() { rg_release(val_arr, val_obj); " + L + "ValueDied(); }\n"
     "    static void rg_release(std::vector<value> & arr, std::vector<std::pair<value, value>> & obj) noexcept;\n"),
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

// func_args method implementations
"""),
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

// SPDX-License-Identifier: Apache-2.0
// Reads cases that the reference library rendered (tests/text/make_template_goldens.py, template_matrix.py)
// and renders them here. Test code only.
#pragma once

#include <simdjson.h>

#include <cstdlib>
#include <functional>
#include <string>

#include "text/chat_template.h"

namespace rankgate::text::goldens {

/// Calls `report(name, same, text)` for every case; returns how many there were (0 = the file cannot be
/// read).
inline std::size_t Compare(const std::string& file,
                           const std::function<void(const std::string&, bool, const std::string&)>& report) {
    namespace dom = simdjson::dom;
    setenv("TZ", "UTC", 1);  // strftime_now
    dom::parser parser;
    dom::element golden;
    if (parser.load(file).get(golden) != simdjson::SUCCESS) {
        return 0;
    }
    const auto text = [](dom::element e) { return std::string{e.get_string().value()}; };
    TemplateTokens tokens;
    const dom::object names = golden["tokens"].get_object().value();
    for (dom::key_value_pair token : names) {
        tokens.emplace_back(token.key, text(token.value));
    }
    std::size_t checked = 0;
    const dom::array cases = golden["cases"].get_array().value();
    for (dom::element c : cases) {
        const std::string name = text(c["name"].value());
        std::string source = text(c["template"].value());
        dom::element shared;
        if (golden["templates"][source].get(shared) == simdjson::SUCCESS) {
            source = text(shared);
        }
        // A value is written out, or named after one of the shared ones.
        const auto json = [&](const char* key, const char* table) -> std::string {
            dom::element value;
            if (c[key].get(value) != simdjson::SUCCESS || value.is_null()) {
                return "";
            }
            if (value.is_string()) {
                value = table == nullptr ? golden[text(value)].value() : golden[table][text(value)].value();
            }
            return simdjson::minify(value);
        };
        const auto flag = [&](const char* key, bool otherwise) {
            bool value = otherwise;
            return c[key].get_bool().get(value) == simdjson::SUCCESS ? value : otherwise;
        };
        const std::string kind = text(c["kind"].value());
        const std::string expect = text(c["expect"].value());
        const auto compiled = ChatTemplate::Compile(source, tokens);
        std::string got_kind = "syntax";
        std::string got;
        bool covered = true;
        if (!compiled.ok()) {
            got = compiled.error().message;
        } else {
            const std::string messages = json("messages", "chats");
            const std::string tools = json("tools", nullptr);
            const std::string kwargs = json("kwargs", nullptr);
            const auto out =
                (*compiled)->Render({.messages = messages,
                                     .tools = tools,
                                     .kwargs = kwargs,
                                     .add_generation_prompt = flag("add_generation_prompt", true),
                                     .continue_final_message = flag("continue_final_message", false),
                                     .now = golden["now"].get_int64().value()});
            got_kind = out.ok() ? "text" : "error";
            got = out.ok() ? out->text : out.error().message;
            if (out.ok()) {
                std::size_t size = 0;
                for (const auto& span : out->spans) {
                    size += span.size;
                }
                covered = size == out->text.size();
            }
        }
        // A fault of the template is a fault whenever we find it; only the words of raise_exception are part
        // of the contract.
        const bool same = kind == "text"    ? got_kind == "text" && got == expect && covered
                          : kind == "raise" ? got_kind == "error" && got == expect
                                            : got_kind != "text";
        ++checked;
        report(name, same,
               name + "\n--- want " + kind + "\n" + expect + "\n--- got " + got_kind + "\n" + got +
                   (covered ? "" : "\n--- spans do not cover the text"));
    }
    return checked;
}

}  // namespace rankgate::text::goldens

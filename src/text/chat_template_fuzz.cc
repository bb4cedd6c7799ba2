// SPDX-License-Identifier: Apache-2.0
// Any template against any messages: an answer or an error, in bounded time, memory and stack; the spans
// cover the text. Input: template, then byte 0xFF, then messages (a fixed conversation when there is no
// 0xFF).
#include <cstddef>
#include <cstdint>
#include <string>

#include "base/check.h"
#include "text/chat_template.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    using namespace rankgate::text;
    const std::string_view input{reinterpret_cast<const char*>(data), size};
    const std::size_t cut = input.find('\xFF');
    const std::string_view messages =
        cut == input.npos
            ? std::
                  string_view{R"([{"role":"system","content":"s"},{"role":"user","content":"hi <|x|>"},{"role":"assistant","content":null,)"
                              R"("tool_calls":[{"id":"1","type":"function","function":{"name":"f","arguments":"{\"a\":[1,2.5,null]}"}}]}])"}
            : input.substr(cut + 1);
    const RenderLimits limits{.cpu_ms = 500,
                              .output_bytes = std::size_t{1} << 20,
                              .steps = 200'000,
                              .values = 20'000,
                              .depth = 200};
    const auto made =
        ChatTemplate::Compile(std::string{input.substr(0, cut)}, {{"bos_token", "<s>"}}, limits);
    if (!made.ok()) {
        RG_CHECK(!made.error().message.empty());
        return 0;
    }
    const auto out = (*made)->Render(
        {.messages = messages, .tools = R"([{"type":"function","function":{"name":"f","parameters":{}}}])"});
    if (!out.ok()) {
        return 0;
    }
    std::size_t covered = 0;
    for (const auto& span : out->spans) {
        RG_CHECK(span.size > 0);
        covered += span.size;
    }
    RG_CHECK(covered == out->text.size() && covered <= limits.output_bytes);
    return 0;
}

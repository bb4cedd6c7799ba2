// SPDX-License-Identifier: Apache-2.0
// Texts that tokenizers disagree on, for the tests that compare them. Deterministic. Test code only.
#pragma once

#include <cstdint>
#include <fstream>
#include <random>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace rankgate::text::corpus {

inline std::string ReadAll(const std::string& path) {
    std::ifstream in{path, std::ios::binary};
    std::ostringstream out;
    out << in.rdbuf();
    return out.str();
}

inline std::vector<std::pair<std::string, std::string>> Texts(const std::string& source_dir) {
    std::vector<std::pair<std::string, std::string>> out;
    out.emplace_back("license", ReadAll(source_dir + "/LICENSE"));
    out.emplace_back("code", ReadAll(source_dir + "/src/text/chat_template.cc"));
    out.emplace_back("json", ReadAll(source_dir + "/tests/text/template_goldens.json"));
    out.emplace_back("contractions",
                     "I'm you've we'll they'd it's DON'T can't I'M 'tis rock'n'roll l'été d'accord");
    out.emplace_back("digits",
                     "1 12 123 1234 12345 1234567890 3.14159 1,000,000 0x1F 2026-11-29 ١٢٣ １２３ ²³ ½");
    out.emplace_back("spaces",
                     " a  b   c    d\t\te\n\n\nf\r\ng \n h \u00a0i\u3000j\u2028k\u2003\u200bl   \n   \n\t\n");
    out.emplace_back(
        "cjk", "中文分词测试。日本語のテキスト、カタカナ。한국어 삼겹살 텍스트! 繁體中文，標點「引號」。");
    out.emplace_back(
        "emoji",
        "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇩🇪🇫🇷 ❤️ 🤷🏿‍♂️ ☺️ "
        "1️⃣");
    out.emplace_back(
        "scripts",
        "Привет, мир! Ελληνικά שלום العربية हिन्दी ไทย ქართული አማርኛ Việt Nam ñandú Ångström ﬁ ŀ ǆ İıßẞ");
    out.emplace_back("combining",
                     "e\u0301 a\u0308 n\u0303 o\u0302\u0323 \u1e69 s\u0323\u0307 \u0915\u094d\u0937");
    out.emplace_back("looks special",
                     "<|im_end|> <|endoftext|> <s></s> [INST] <think> <0x41> ▁▁ Ġ Ċ <|unknown|> < | x | >");
    out.emplace_back("symbols", "!@#$%^&*()_+-=[]{}|;':\",./<>?`~ ===>>> //// **** ---- …—–“”‘’«»€£¥©®™°±×÷");
    std::mt19937 random{5};
    std::string mix;
    const std::uint32_t blocks[][2] = {{0x20, 0x7E},     {0xA1, 0x24F},    {0x370, 0x3FF},    {0x400, 0x4FF},
                                       {0x4E00, 0x9FA5}, {0xAC00, 0xD7A3}, {0x1F600, 0x1F64F}};
    for (int i = 0; i < 6000; ++i) {
        const auto& block = blocks[random() % std::size(blocks)];
        const std::uint32_t c =
            random() % 6 == 0 ? ' '
                              : block[0] + static_cast<std::uint32_t>(random() % (block[1] - block[0] + 1));
        if (c == 0x378 || c == 0x379 || (c >= 0x380 && c <= 0x383) || c == 0x38B || c == 0x38D ||
            c == 0x3A2) {
            continue;  // not assigned
        }
        if (c < 0x80) {
            mix += static_cast<char>(c);
        } else if (c < 0x800) {
            mix += static_cast<char>(0xC0 | (c >> 6));
            mix += static_cast<char>(0x80 | (c & 0x3F));
        } else if (c < 0x10000) {
            mix += static_cast<char>(0xE0 | (c >> 12));
            mix += static_cast<char>(0x80 | ((c >> 6) & 0x3F));
            mix += static_cast<char>(0x80 | (c & 0x3F));
        } else {
            mix += static_cast<char>(0xF0 | (c >> 18));
            mix += static_cast<char>(0x80 | ((c >> 12) & 0x3F));
            mix += static_cast<char>(0x80 | ((c >> 6) & 0x3F));
            mix += static_cast<char>(0x80 | (c & 0x3F));
        }
    }
    out.emplace_back("mix", mix);
    return out;
}

/// Runs without a break: what makes naive tokenizers quadratic.
inline const std::vector<std::pair<std::string, std::string>>& Runs() {
    static const std::vector<std::pair<std::string, std::string>> runs = {{"a", "a"},
                                                                          {"_", "_"},
                                                                          {"space", " "},
                                                                          {"newline", "\n"},
                                                                          {"1", "1"},
                                                                          {"cjk", "\xE4\xBD\xA0"},
                                                                          {"emoji", "\xF0\x9F\x98\x80"},
                                                                          {"mark", "\xCC\x81"},
                                                                          {"word", "a "},
                                                                          {"mixed", "aB1_"},
                                                                          {"tab", "\t"},
                                                                          {"crlf", "\r\n"}};
    return runs;
}

}  // namespace rankgate::text::corpus

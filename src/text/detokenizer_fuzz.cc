// SPDX-License-Identifier: Apache-2.0
// Any ids, cut anywhere: the text is always valid UTF-8, equals the decoding of all ids at once, and at most
// three bytes wait.
#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/check.h"
#include "base/utf8.h"
#include "text/detokenizer.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    using namespace rankgate;
    using namespace rankgate::text;
    static const TokenTable table = [] {
        TokenTable::Builder builder;
        for (int byte = 0; byte < 240; ++byte) {
            const char c = static_cast<char>(byte + 16);
            builder.Add({&c, 1}, byte % 3 == 0 ? TokenTable::kByteFallback : 0);
        }
        builder.Add(" \xE2\x82", 0);
        builder.Add("\xAC\xF0\x9F", 0);
        builder.Add("<s>", TokenTable::kSpecial | TokenTable::kAdded);
        builder.Add(" added ", TokenTable::kAdded);
        builder.Add("", TokenTable::kHole);
        builder.Add("", 0);
        builder.Add("  ", 0);
        return std::move(builder).Build(true);
    }();
    if (size == 0) {
        return 0;
    }
    const Detokenizer::Options options{(data[0] & 1) != 0, (data[0] & 2) != 0};
    std::vector<TokenId> ids;
    for (std::size_t i = 1; i < size; ++i) {
        ids.push_back(data[i]);
    }
    const std::string whole = Detokenize(table, ids, options);
    RG_CHECK(IsValidUtf8(whole));
    std::string streamed;
    Detokenizer detokenizer{table, options};
    for (std::size_t at = 0; at < ids.size();) {
        const std::size_t count =
            std::min<std::size_t>(1 + static_cast<std::size_t>(ids[at]) % 3, ids.size() - at);
        detokenizer.Append(std::span{ids}.subspan(at, count), streamed);
        RG_CHECK(detokenizer.held() <= 3);
        RG_CHECK(IsValidUtf8(streamed));
        at += count;
    }
    detokenizer.Flush(streamed);
    RG_CHECK(streamed == whole);
    return 0;
}

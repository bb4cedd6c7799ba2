// SPDX-License-Identifier: Apache-2.0
// Any bytes as a grammar: parse, mask, follow for a few tokens. Must end soon, whatever the grammar; and a
// token that the mask allows must be accepted.
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/check.h"
#include "engine/grammar.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    using namespace rankgate::engine;
    static const TokenTable* const table = [] {
        std::vector<std::string> pieces{"",  "a",  "b", "ab", "abc",      "\"",   "{",  "}",
                                        " ", "\n", "1", "12", "\xc3\xa9", "\xc3", "xyz"};
        for (int c = 32; c < 127; ++c) {
            pieces.emplace_back(1, static_cast<char>(c));
        }
        return new TokenTable{std::move(pieces)};
    }();
    auto grammar = Grammar::Parse({reinterpret_cast<const char*>(data), size});
    if (!grammar.ok()) {
        return 0;
    }
    GrammarState state{*grammar};
    std::vector<std::uint8_t> allowed;
    for (std::size_t step = 0; step < 4; ++step) {
        if (!state.Mask(*table, allowed).ok()) {
            return 0;
        }
        std::size_t token = (step * 37) % allowed.size();
        std::size_t tried = 0;
        while (tried < allowed.size() && allowed[token] == 0) {
            token = (token + 1) % allowed.size();
            ++tried;
        }
        if (allowed[token] == 0) {
            return 0;
        }
        if (!state.Accept(table->piece(static_cast<TokenId>(token))).ok()) {
            // Only the bound on what a sequence may hold can come between.
            RG_CHECK(step > 0 || size > 1000);
            return 0;
        }
    }
    return 0;
}

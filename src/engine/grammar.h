// SPDX-License-Identifier: Apache-2.0
// Guided decoding for the llama runner: a grammar in GBNF (the EBNF of llama.cpp) as an Earley recogniser
// over bytes. A grammar comes from a client, so everything is bounded: its size, its nesting, its expansion,
// and the work and memory of every call. An ambiguous grammar costs its own request an error; it can neither
// stall nor crash the rank (llama.cpp's own matcher can do both). Grammar and TokenTable are immutable;
// GrammarState belongs to one sequence and the core thread.
#pragma once

#include <bitset>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "engine/sequence.h"

namespace rankgate::engine {

inline constexpr std::size_t kMaxGrammarBytes = 64U << 10;
inline constexpr int kMaxGrammarDepth = 64;
inline constexpr std::size_t kMaxGrammarSymbols = 50'000;
/// Items one call may make (about 20 ns each), and items a sequence may hold (8 bytes each).
inline constexpr std::size_t kMaxGrammarWork = 8'000'000;
inline constexpr std::size_t kMaxGrammarItems = 2'000'000;

class Grammar {
  public:
    /// Rules `name ::= alternatives` with "literals", [classes], ., (groups), * + ? {m,n}, # comments; starts
    /// at `root`.
    static Result<std::shared_ptr<const Grammar>> Parse(std::string_view text);

  private:
    friend class GrammarState;
    friend class GrammarParser;
    using ByteSet = std::bitset<256>;
    /// In symbols_: a rule (>= 0), a byte set (kFirstSet - i), or the end of a production of rule r
    /// (kFirstEnd - r).
    static constexpr std::int32_t kFirstSet = -1;
    static constexpr std::int32_t kFirstEnd = -1'000'000'000;

    std::vector<std::int32_t> symbols_;
    std::vector<std::vector<std::int32_t>>
        productions_;             // per rule: where each of its productions starts in symbols_
    std::vector<bool> nullable_;  // per rule
    std::vector<ByteSet> sets_;
    std::int32_t root_{0};
};

/// The vocabulary in byte order, so that tokens with a common beginning are tried together.
class TokenTable {
  public:
    /// `pieces[id]` = bytes of a token; empty ones (control tokens) are never allowed by a grammar.
    explicit TokenTable(std::vector<std::string> pieces);
    std::string_view piece(TokenId token) const noexcept { return pieces_[static_cast<std::size_t>(token)]; }
    std::size_t size() const noexcept { return pieces_.size(); }

  private:
    friend class GrammarState;
    struct Entry {
        TokenId token{0};
        std::uint32_t shared{0};  // bytes in common with the entry before
    };
    std::vector<std::string> pieces_;
    std::vector<Entry> order_;
};

class GrammarState {
  public:
    explicit GrammarState(std::shared_ptr<const Grammar> grammar);

    /// The text went on by `bytes`. An error when the grammar does not allow them or is too ambiguous to
    /// follow.
    Status Accept(std::string_view bytes);
    /// Is the text so far a whole sentence of the grammar?
    bool complete() const noexcept;
    /// allowed[t] = 1 for every token that may come next (EOS is the caller's: see complete()).
    Status Mask(const TokenTable& table, std::vector<std::uint8_t>& allowed);

  private:
    struct Item {
        std::int32_t dot{0};     // into symbols_
        std::int32_t origin{0};  // the set it began in
    };
    enum class Step : std::uint8_t { kAdvanced, kRefused, kTooMuch };
    Step Advance(unsigned char byte);
    bool Close(std::size_t first);  // predicts and completes the newest set; false = over budget
    bool Add(Item item);
    void NewSet();
    void Truncate(std::size_t sets);
    std::size_t sets() const noexcept { return starts_.size(); }

    std::shared_ptr<const Grammar> grammar_;
    std::vector<Item> items_;
    std::vector<std::size_t> starts_;  // where each set begins in items_
    struct Seen {
        std::uint64_t key{0};
        std::uint32_t serial{0};
    };
    std::vector<Seen> seen_;  // open addressing: items of the newest set
    std::uint32_t serial_{0};
    std::vector<std::uint64_t> predicted_;  // per rule: the last set it was predicted in
    std::uint64_t set_serial_{0};
    bool broken_{false};  // too ambiguous from the first byte on
    std::size_t in_set_{0};
    std::size_t work_{0};
};

}  // namespace rankgate::engine

// SPDX-License-Identifier: Apache-2.0
#include "engine/grammar.h"

#include <algorithm>
#include <cctype>
#include <map>
#include <optional>
#include <utility>

namespace rankgate::engine {

namespace {

using Range = std::pair<std::uint32_t, std::uint32_t>;  // code points, both ends in

constexpr std::uint32_t kMaxCodePoint = 0x10ffff;

std::string Utf8(std::uint32_t c) {
    std::string out;
    if (c < 0x80) {
        out.push_back(static_cast<char>(c));
    } else if (c < 0x800) {
        out.push_back(static_cast<char>(0xc0 | (c >> 6)));
        out.push_back(static_cast<char>(0x80 | (c & 0x3f)));
    } else if (c < 0x10000) {
        out.push_back(static_cast<char>(0xe0 | (c >> 12)));
        out.push_back(static_cast<char>(0x80 | ((c >> 6) & 0x3f)));
        out.push_back(static_cast<char>(0x80 | (c & 0x3f)));
    } else {
        out.push_back(static_cast<char>(0xf0 | (c >> 18)));
        out.push_back(static_cast<char>(0x80 | ((c >> 12) & 0x3f)));
        out.push_back(static_cast<char>(0x80 | ((c >> 6) & 0x3f)));
        out.push_back(static_cast<char>(0x80 | (c & 0x3f)));
    }
    return out;
}

/// Splits a range of code points into runs whose UTF-8 forms differ in whole byte ranges only.
void SplitUtf8(std::uint32_t low, std::uint32_t high, std::vector<std::pair<std::string, std::string>>& out) {
    for (const std::uint32_t border : {0x7fU, 0x7ffU, 0xffffU}) {
        if (low <= border && border < high) {
            SplitUtf8(low, border, out);
            SplitUtf8(border + 1, high, out);
            return;
        }
    }
    if (high > 0x7f) {
        for (std::uint32_t i = 1; i < 4; ++i) {
            const std::uint32_t mask = (1U << (6 * i)) - 1;
            if ((low & ~mask) != (high & ~mask)) {
                if ((low & mask) != 0) {
                    SplitUtf8(low, low | mask, out);
                    SplitUtf8((low | mask) + 1, high, out);
                    return;
                }
                if ((high & mask) != mask) {
                    SplitUtf8(low, (high & ~mask) - 1, out);
                    SplitUtf8(high & ~mask, high, out);
                    return;
                }
            }
        }
    }
    out.emplace_back(Utf8(low), Utf8(high));
}

}  // namespace

/// Recursive descent with a bounded depth; makes productions as it goes.
class GrammarParser {
  public:
    explicit GrammarParser(std::string_view text) : text_{text} {}

    Result<std::shared_ptr<const Grammar>> Run() {
        if (text_.size() > kMaxGrammarBytes) {
            return Error::Invalid("structured_outputs", "the grammar is longer than " +
                                                            std::to_string(kMaxGrammarBytes) + " bytes");
        }
        SkipSpace();
        while (at_ < text_.size() && error_.empty()) {
            const std::string_view name = TakeName();
            SkipSpace();
            if (name.empty() || !TakeLiteral("::=")) {
                Fail("expected a rule, `name ::= ...`");
                break;
            }
            SkipSpace();
            const std::int32_t rule = RuleOf(name);
            if (defined_[static_cast<std::size_t>(rule)]) {
                Fail("rule " + std::string{name} + " is defined twice");
                break;
            }
            defined_[static_cast<std::size_t>(rule)] = true;
            Alternatives(rule, 0);
        }
        const auto root = names_.find("root");
        if (error_.empty() && root == names_.end()) {
            Fail("there is no rule `root`");
        }
        for (const auto& [name, rule] : names_) {
            if (error_.empty() && !defined_[static_cast<std::size_t>(rule)]) {
                Fail("rule " + name.substr(0, 64) + " is used but not defined");
            }
        }
        if (!error_.empty()) {
            return Error::Invalid("structured_outputs",
                                  "grammar: " + error_ + " (at byte " + std::to_string(at_) + ")");
        }
        grammar_->root_ = NewRule();
        Produce(grammar_->root_, {root->second});
        FindNullable();
        return std::shared_ptr<const Grammar>{std::move(grammar_)};
    }

  private:
    using Symbols = std::vector<std::int32_t>;

    void Fail(std::string why) {
        if (error_.empty()) {
            error_ = std::move(why);
        }
    }
    bool TakeLiteral(std::string_view what) {
        if (text_.substr(at_, what.size()) != what) {
            return false;
        }
        at_ += what.size();
        return true;
    }
    void SkipSpace() {
        while (at_ < text_.size()) {
            const char c = text_[at_];
            if (c == '#') {
                while (at_ < text_.size() && text_[at_] != '\n') {
                    ++at_;
                }
            } else if (c == ' ' || c == '\t' || c == '\n' || c == '\r') {
                ++at_;
            } else {
                return;
            }
        }
    }
    std::string_view TakeName() {
        const std::size_t from = at_;
        while (at_ < text_.size() && (std::isalnum(static_cast<unsigned char>(text_[at_])) != 0 ||
                                      text_[at_] == '-' || text_[at_] == '_')) {
            ++at_;
        }
        return text_.substr(from, at_ - from);
    }
    std::int32_t NewRule() {
        grammar_->productions_.emplace_back();
        defined_.push_back(true);
        return static_cast<std::int32_t>(grammar_->productions_.size()) - 1;
    }
    std::int32_t RuleOf(std::string_view name) {
        const auto found = names_.find(std::string{name});
        if (found != names_.end()) {
            return found->second;
        }
        const std::int32_t rule = NewRule();
        defined_.back() = false;
        names_.emplace(std::string{name}, rule);
        return rule;
    }
    void Produce(std::int32_t rule, const Symbols& body) {
        std::vector<std::int32_t>& symbols = grammar_->symbols_;
        if (symbols.size() + body.size() + 1 > kMaxGrammarSymbols) {
            Fail("it expands to more than " + std::to_string(kMaxGrammarSymbols) + " symbols");
            return;
        }
        grammar_->productions_[static_cast<std::size_t>(rule)].push_back(
            static_cast<std::int32_t>(symbols.size()));
        symbols.insert(symbols.end(), body.begin(), body.end());
        symbols.push_back(Grammar::kFirstEnd - rule);
    }
    std::int32_t SetOf(const Grammar::ByteSet& set) {
        const auto [entry, fresh] =
            set_index_.try_emplace(set.to_string(), static_cast<std::int32_t>(grammar_->sets_.size()));
        if (fresh) {
            grammar_->sets_.push_back(set);
        }
        return Grammar::kFirstSet - entry->second;
    }

    void Alternatives(std::int32_t rule, int depth) {
        if (depth > kMaxGrammarDepth) {
            Fail("groups are nested deeper than " + std::to_string(kMaxGrammarDepth));
            return;
        }
        do {
            SkipSpace();
            Produce(rule, Sequence(depth));
            SkipSpace();
        } while (error_.empty() && TakeLiteral("|"));
    }

    /// Is a new rule's head next? (Newlines are white space here, so that long rules may be wrapped.)
    bool AtRuleHead() {
        const std::size_t here = at_;
        const bool head = !TakeName().empty() && (SkipSpace(), text_.substr(at_, 3) == "::=");
        at_ = here;
        return head;
    }

    Symbols Sequence(int depth) {
        Symbols body;
        while (error_.empty()) {
            SkipSpace();
            if (at_ >= text_.size() || text_[at_] == '|' || text_[at_] == ')' || AtRuleHead()) {
                break;
            }
            Symbols part = Element(depth);
            if (error_.empty()) {
                part = Repeated(std::move(part));
            }
            body.insert(body.end(), part.begin(), part.end());
            if (body.size() > kMaxGrammarSymbols) {
                Fail("it expands to more than " + std::to_string(kMaxGrammarSymbols) + " symbols");
            }
        }
        return body;
    }

    Symbols Element(int depth) {
        const char c = text_[at_];
        if (c == '"') {
            ++at_;
            Symbols body;
            while (at_ < text_.size() && text_[at_] != '"' && error_.empty()) {
                std::string bytes(1, text_[at_]);
                if (text_[at_] == '\\') {
                    const std::optional<std::uint32_t> escaped = Escape();
                    bytes = escaped.has_value() ? Utf8(*escaped) : "";
                } else {
                    ++at_;
                }
                for (const char byte : bytes) {
                    Grammar::ByteSet set;
                    set.set(static_cast<unsigned char>(byte));
                    body.push_back(SetOf(set));
                }
            }
            if (!TakeLiteral("\"")) {
                Fail("a literal does not end");
            }
            return body;
        }
        if (c == '[') {
            return {Class()};
        }
        if (c == '.') {
            ++at_;
            return {ClassOf({{0, kMaxCodePoint}})};
        }
        if (c == '(') {
            ++at_;
            const std::int32_t rule = NewRule();
            Alternatives(rule, depth + 1);
            SkipSpace();
            if (!TakeLiteral(")")) {
                Fail("a group does not end");
            }
            return {rule};
        }
        const std::string_view name = TakeName();
        if (name.empty()) {
            Fail("unexpected character");
            return {};
        }
        return {RuleOf(name)};
    }

    /// One backslash sequence as a code point.
    std::optional<std::uint32_t> Escape() {
        ++at_;
        const char c = at_ < text_.size() ? text_[at_++] : '\0';
        std::size_t digits = 0;
        switch (c) {
            case 'n':
                return '\n';
            case 'r':
                return '\r';
            case 't':
                return '\t';
            case 'x':
                digits = 2;
                break;
            case 'u':
                digits = 4;
                break;
            case 'U':
                digits = 8;
                break;
            default:
                if (c != '\0' && std::isalnum(static_cast<unsigned char>(c)) == 0) {
                    return static_cast<unsigned char>(c);
                }
                Fail("unknown escape");
                return std::nullopt;
        }
        std::uint32_t value = 0;
        for (std::size_t i = 0; i < digits; ++i) {
            const char d = at_ < text_.size() ? text_[at_] : '\0';
            if (std::isxdigit(static_cast<unsigned char>(d)) == 0) {
                Fail("an escape wants " + std::to_string(digits) + " hexadecimal digits");
                return std::nullopt;
            }
            value = value * 16 + static_cast<std::uint32_t>(d <= '9' ? d - '0' : (d | 0x20) - 'a' + 10);
            ++at_;
        }
        if (value > kMaxCodePoint || (value >= 0xd800 && value <= 0xdfff)) {
            Fail("an escape is no code point");
            return std::nullopt;
        }
        return value;
    }

    std::optional<std::uint32_t> ClassChar() {
        if (text_[at_] == '\\') {
            return Escape();
        }
        const auto lead = static_cast<unsigned char>(text_[at_]);
        const std::size_t size = lead < 0x80 ? 1 : lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : lead >= 0xc0 ? 2 : 0;
        if (size == 0 || at_ + size > text_.size()) {
            Fail("invalid UTF-8 in a class");
            return std::nullopt;
        }
        std::uint32_t value = size == 1 ? lead : lead & (0xffU >> (size + 1));
        for (std::size_t i = 1; i < size; ++i) {
            value = (value << 6) | (static_cast<unsigned char>(text_[at_ + i]) & 0x3fU);
        }
        at_ += size;
        if (value > kMaxCodePoint) {
            Fail("invalid UTF-8 in a class");
            return std::nullopt;
        }
        return value;
    }

    std::int32_t Class() {
        ++at_;
        const bool negated = TakeLiteral("^");
        std::vector<Range> ranges;
        while (error_.empty() && at_ < text_.size() && text_[at_] != ']') {
            const std::optional<std::uint32_t> low = ClassChar();
            std::optional<std::uint32_t> high = low;
            if (low.has_value() && at_ + 1 < text_.size() && text_[at_] == '-' && text_[at_ + 1] != ']') {
                ++at_;
                high = ClassChar();
            }
            if (low.has_value() && high.has_value()) {
                if (*high < *low) {
                    Fail("a class range is upside down");
                }
                ranges.emplace_back(*low, *high);
            }
        }
        if (!TakeLiteral("]")) {
            Fail("a class does not end");
        }
        std::sort(ranges.begin(), ranges.end());
        if (!negated) {
            return ClassOf(ranges);
        }
        std::vector<Range> rest;
        std::uint32_t next = 0;
        for (const auto& [low, high] : ranges) {
            if (low > next) {
                rest.emplace_back(next, low - 1);
            }
            next = std::max(next, high + 1);
        }
        if (next <= kMaxCodePoint) {
            rest.emplace_back(next, kMaxCodePoint);
        }
        return ClassOf(rest);
    }

    /// Sorted ranges as one symbol: a byte set when all is ASCII, else a rule over UTF-8 sequences.
    /// Surrogates have no UTF-8 form.
    std::int32_t ClassOf(const std::vector<Range>& ranges) {
        Grammar::ByteSet ascii;
        std::vector<std::pair<std::string, std::string>> runs;
        for (const auto& [low, high] : ranges) {
            for (std::uint32_t c = low; c <= std::min(high, 0x7fU); ++c) {
                ascii.set(c);
            }
            for (const auto& [from, to] : {Range{0x80, 0xd7ff}, Range{0xe000, kMaxCodePoint}}) {
                if (std::max(low, from) <= std::min(high, to)) {
                    SplitUtf8(std::max(low, from), std::min(high, to), runs);
                }
            }
            if (runs.size() > kMaxGrammarSymbols) {
                Fail("a class is too scattered");
                return 0;
            }
        }
        if (runs.empty()) {
            return SetOf(ascii);
        }
        const std::int32_t rule = NewRule();
        if (ascii.any()) {
            Produce(rule, {SetOf(ascii)});
        }
        for (const auto& [from, to] : runs) {
            Symbols body;
            for (std::size_t i = 0; i < from.size(); ++i) {
                Grammar::ByteSet set;
                for (auto b = static_cast<unsigned>(static_cast<unsigned char>(from[i]));
                     b <= static_cast<unsigned char>(to[i]); ++b) {
                    set.set(b);
                }
                body.push_back(SetOf(set));
            }
            Produce(rule, body);
        }
        return rule;
    }

    std::int64_t Number() {
        std::int64_t value = -1;
        while (at_ < text_.size() && std::isdigit(static_cast<unsigned char>(text_[at_])) != 0 &&
               value < 1'000'000) {
            value = std::max<std::int64_t>(value, 0) * 10 + (text_[at_++] - '0');
        }
        return value;
    }

    Symbols Repeated(Symbols part) {
        while (error_.empty() && at_ < text_.size()) {
            std::int64_t low = 0;
            std::int64_t high = -1;  // no end
            if (TakeLiteral("*")) {
            } else if (TakeLiteral("+")) {
                low = 1;
            } else if (TakeLiteral("?")) {
                high = 1;
            } else if (TakeLiteral("{")) {
                SkipSpace();
                low = std::max<std::int64_t>(Number(), 0);
                high = low;
                SkipSpace();
                if (TakeLiteral(",")) {
                    SkipSpace();
                    high = Number();
                    SkipSpace();
                }
                if (!TakeLiteral("}") || (high >= 0 && high < low)) {
                    Fail("a repetition is {m}, {m,} or {m,n} with m <= n");
                }
            } else {
                break;
            }
            if (!error_.empty()) {
                break;
            }
            const std::int64_t copies = std::max(low, high);
            if (copies > static_cast<std::int64_t>(kMaxGrammarSymbols) / 4) {
                Fail("a repetition of " + std::to_string(copies) + " is too long");
                break;
            }
            std::int32_t one = 0;
            if (part.size() == 1) {
                one = part[0];
            } else {
                one = NewRule();
                Produce(one, part);
            }
            part.assign(static_cast<std::size_t>(low), one);
            if (high < 0) {
                // Left recursion keeps an Earley set small however long the repetition gets.
                const std::int32_t star = NewRule();
                Produce(star, {});
                Produce(star, {star, one});
                part.push_back(star);
            } else {
                std::int32_t tail = -1;
                for (std::int64_t i = low; i < high && error_.empty(); ++i) {
                    const std::int32_t optional = NewRule();
                    Produce(optional, {});
                    Produce(optional, tail < 0 ? Symbols{one} : Symbols{one, tail});
                    tail = optional;
                }
                if (tail >= 0) {
                    part.push_back(tail);
                }
            }
        }
        return part;
    }

    void FindNullable() {
        grammar_->nullable_.assign(grammar_->productions_.size(), false);
        for (bool changed = true; changed;) {
            changed = false;
            for (std::size_t rule = 0; rule < grammar_->productions_.size(); ++rule) {
                for (const std::int32_t start : grammar_->productions_[rule]) {
                    std::size_t at = static_cast<std::size_t>(start);
                    while (grammar_->symbols_[at] >= 0 &&
                           grammar_->nullable_[static_cast<std::size_t>(grammar_->symbols_[at])]) {
                        ++at;
                    }
                    if (grammar_->symbols_[at] <= Grammar::kFirstEnd && !grammar_->nullable_[rule]) {
                        grammar_->nullable_[rule] = true;
                        changed = true;
                    }
                }
            }
        }
    }

    std::string_view text_;
    std::size_t at_{0};
    std::string error_;
    std::shared_ptr<Grammar> grammar_{std::make_shared<Grammar>()};
    std::map<std::string, std::int32_t> names_;
    std::vector<bool> defined_;
    std::map<std::string, std::int32_t> set_index_;
};

Result<std::shared_ptr<const Grammar>> Grammar::Parse(std::string_view text) {
    return GrammarParser{text}.Run();
}

TokenTable::TokenTable(std::vector<std::string> pieces) : pieces_{std::move(pieces)} {
    for (std::size_t i = 0; i < pieces_.size(); ++i) {
        if (!pieces_[i].empty()) {
            order_.push_back(Entry{static_cast<TokenId>(i), 0});
        }
    }
    std::sort(order_.begin(), order_.end(), [&](const Entry& a, const Entry& b) {
        const int order = piece(a.token).compare(piece(b.token));
        return order != 0 ? order < 0 : a.token < b.token;
    });
    for (std::size_t i = 1; i < order_.size(); ++i) {
        const std::string_view before = piece(order_[i - 1].token);
        const std::string_view here = piece(order_[i].token);
        std::uint32_t shared = 0;
        while (shared < before.size() && shared < here.size() && before[shared] == here[shared]) {
            ++shared;
        }
        order_[i].shared = shared;
    }
}

GrammarState::GrammarState(std::shared_ptr<const Grammar> grammar)
    : grammar_{std::move(grammar)}, seen_(1024), predicted_(grammar_->productions_.size()) {
    NewSet();
    for (const std::int32_t start : grammar_->productions_[static_cast<std::size_t>(grammar_->root_)]) {
        Add(Item{start, 0});
    }
    broken_ = !Close(0);
}

void GrammarState::NewSet() {
    starts_.push_back(items_.size());
    ++set_serial_;
    in_set_ = 0;
    if (++serial_ == 0) {  // wrapped: old marks would come alive
        std::fill(seen_.begin(), seen_.end(), Seen{});
        serial_ = 1;
    }
}

void GrammarState::Truncate(std::size_t sets) {
    if (sets < starts_.size()) {
        items_.resize(starts_[sets]);
        starts_.resize(sets);
    }
}

bool GrammarState::Add(Item item) {
    const std::uint64_t key = (static_cast<std::uint64_t>(static_cast<std::uint32_t>(item.dot)) << 32) |
                              static_cast<std::uint32_t>(item.origin);
    if (in_set_ * 2 >= seen_.size()) {
        seen_.assign(seen_.size() * 2, Seen{});
        serial_ = 1;
        in_set_ = 0;
        const std::vector<Item> again{items_.begin() + static_cast<std::ptrdiff_t>(starts_.back()),
                                      items_.end()};
        items_.resize(starts_.back());
        for (const Item& old : again) {
            Add(old);
        }
    }
    const std::size_t mask = seen_.size() - 1;
    for (std::size_t at = (key * 0x9e3779b97f4a7c15ULL >> 40) & mask;; at = (at + 1) & mask) {
        Seen& seen = seen_[at];
        if (seen.serial != serial_) {
            seen = Seen{key, serial_};
            items_.push_back(item);
            ++in_set_;
            ++work_;
            return true;
        }
        if (seen.key == key) {
            return false;
        }
    }
}

bool GrammarState::Close(std::size_t first) {
    const auto current = static_cast<std::int32_t>(starts_.size() - 1);
    for (std::size_t i = first; i < items_.size(); ++i) {
        if (work_ > kMaxGrammarWork || items_.size() > kMaxGrammarItems) {
            return false;
        }
        const Item item = items_[i];
        const std::int32_t symbol = grammar_->symbols_[static_cast<std::size_t>(item.dot)];
        if (symbol >= 0) {
            std::uint64_t& predicted = predicted_[static_cast<std::size_t>(symbol)];
            if (predicted != set_serial_) {
                predicted = set_serial_;
                for (const std::int32_t start : grammar_->productions_[static_cast<std::size_t>(symbol)]) {
                    Add(Item{start, current});
                }
            }
            if (grammar_->nullable_[static_cast<std::size_t>(symbol)]) {
                Add(Item{item.dot + 1, item.origin});
            }
        } else if (symbol <= Grammar::kFirstEnd && item.origin != current) {
            // Complete; with origin == current it derived nothing, and prediction has stepped over it
            // already.
            const std::int32_t rule = Grammar::kFirstEnd - symbol;
            const std::size_t begin = starts_[static_cast<std::size_t>(item.origin)];
            const std::size_t end = starts_[static_cast<std::size_t>(item.origin) + 1];
            work_ += (end - begin) / 8;
            for (std::size_t k = begin; k < end; ++k) {
                const Item parent = items_[k];
                if (grammar_->symbols_[static_cast<std::size_t>(parent.dot)] == rule) {
                    Add(Item{parent.dot + 1, parent.origin});
                }
            }
        }
    }
    return true;
}

GrammarState::Step GrammarState::Advance(unsigned char byte) {
    const std::size_t begin = starts_.back();
    const std::size_t end = items_.size();
    NewSet();
    for (std::size_t i = begin; i < end; ++i) {
        const Item item = items_[i];
        const std::int32_t symbol = grammar_->symbols_[static_cast<std::size_t>(item.dot)];
        if (symbol < 0 && symbol > Grammar::kFirstEnd &&
            grammar_->sets_[static_cast<std::size_t>(Grammar::kFirstSet - symbol)].test(byte)) {
            Add(Item{item.dot + 1, item.origin});
        }
    }
    work_ += (end - begin) / 8 + 1;
    if (items_.size() == end) {
        Truncate(starts_.size() - 1);
        return Step::kRefused;
    }
    return Close(end) ? Step::kAdvanced : Step::kTooMuch;
}

Status GrammarState::Accept(std::string_view bytes) {
    if (broken_) {
        return Error::Invalid("structured_outputs", "the grammar is too ambiguous to follow");
    }
    work_ = 0;
    const std::size_t before = sets();
    for (const char byte : bytes) {
        const Step step = Advance(static_cast<unsigned char>(byte));
        if (step != Step::kAdvanced) {
            Truncate(before);
            return Error::Invalid("structured_outputs", step == Step::kRefused
                                                            ? "the grammar does not go on like this"
                                                            : "the grammar is too ambiguous to follow");
        }
    }
    return Status::Ok();
}

bool GrammarState::complete() const noexcept {
    for (std::size_t i = starts_.back(); i < items_.size(); ++i) {
        if (items_[i].origin == 0 && grammar_->symbols_[static_cast<std::size_t>(items_[i].dot)] ==
                                         Grammar::kFirstEnd - grammar_->root_) {
            return true;
        }
    }
    return false;
}

Status GrammarState::Mask(const TokenTable& table, std::vector<std::uint8_t>& allowed) {
    allowed.assign(table.size(), 0);
    if (broken_) {
        return Error::Invalid("structured_outputs", "the grammar is too ambiguous to follow");
    }
    work_ = 0;
    const std::size_t base = sets();
    std::size_t dead =
        SIZE_MAX;  // tokens that share more than this many bytes with the one before are refused as it was
    for (const TokenTable::Entry& entry : table.order_) {
        if (entry.shared > dead) {
            continue;
        }
        dead = SIZE_MAX;
        Truncate(base + entry.shared);
        const std::string_view bytes = table.piece(entry.token);
        bool fits = true;
        for (std::size_t i = sets() - base; i < bytes.size(); ++i) {
            const Step step = Advance(static_cast<unsigned char>(bytes[i]));
            if (step == Step::kTooMuch) {
                Truncate(base);
                return Error::Invalid("structured_outputs", "the grammar is too ambiguous to follow");
            }
            if (step == Step::kRefused) {
                dead = i;
                fits = false;
                break;
            }
        }
        allowed[static_cast<std::size_t>(entry.token)] = fits ? 1 : 0;
    }
    Truncate(base);
    return Status::Ok();
}

}  // namespace rankgate::engine

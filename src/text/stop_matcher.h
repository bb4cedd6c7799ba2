// SPDX-License-Identifier: Apache-2.0
// Stop strings: StopSet is a request's strings compiled once (Aho-Corasick over bytes), StopMatcher the place
// of one stream in it. The match that ends first wins; of several that end at the same byte the longest. So
// the result does not depend on how the text was cut into pieces, and with one stop string it is the leftmost
// occurrence. What is held back is exactly the longest end of the text that begins some stop string: no more,
// and it is a prefix of that string, so holding it needs no buffer. Thread rule: StopSet immutable and shared
// by the choices of a request; StopMatcher one thread at a time, allocates nothing.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"

namespace rankgate::text {

/// Bounds of what a request may ask for (400 above).
inline constexpr std::size_t kMaxStopStrings = 4096;
inline constexpr std::size_t kMaxStopBytes = std::size_t{1} << 20;  // all strings together

class StopSet {
  public:
    /// Empty strings are an error (param "stop"); duplicates are fine. An empty list gives a set that never
    /// matches.
    static Result<std::shared_ptr<const StopSet>> Compile(std::vector<std::string> strings);

    bool empty() const noexcept { return strings_.empty(); }
    std::size_t size() const noexcept { return strings_.size(); }
    const std::string& string(std::size_t index) const noexcept { return strings_[index]; }

  private:
    friend class StopMatcher;
    struct Node {
        std::int32_t fail{0};
        std::int32_t first_child{-1};
        std::int32_t next_sibling{-1};
        std::int32_t depth{0};
        std::int32_t owner{0};    // a string that begins with this node's path
        std::int32_t output{-1};  // the longest string that ends here, or -1
        unsigned char byte{0};
    };

    StopSet() = default;
    std::int32_t Child(std::int32_t node, unsigned char byte) const noexcept;
    std::int32_t Next(std::int32_t node, unsigned char byte) const noexcept;

    std::vector<std::string> strings_;
    std::vector<Node> nodes_;
    std::array<std::int32_t, 256> root_{};  // children of the root; 0 = none
};

class StopMatcher {
  public:
    struct Match {
        std::size_t index;  // into the set, in the order of the request
    };

    /// `set` may be null (never matches) and must outlive the matcher.
    StopMatcher(const StopSet* set, bool include_stop_string) noexcept
        : set_{set}, include_{include_stop_string} {}

    /// Takes the next piece of text, appends what may be shown, and says whether a stop string ended in it.
    /// After a match the stream is over: the rest of the piece is dropped and the object must not be fed
    /// again.
    std::optional<Match> Append(std::string_view text, std::string& out);

    /// End of the stream without a match: what was held back is shown.
    void Flush(std::string& out);

    /// Bytes held back now.
    std::size_t held() const noexcept {
        return set_ == nullptr || set_->empty()
                   ? 0
                   : static_cast<std::size_t>(set_->nodes_[static_cast<std::size_t>(state_)].depth);
    }

  private:
    const StopSet* set_;
    std::int32_t state_{0};
    bool include_;
};

}  // namespace rankgate::text

// SPDX-License-Identifier: Apache-2.0
#include "text/stop_matcher.h"

#include <algorithm>

namespace rankgate::text {

Result<std::shared_ptr<const StopSet>> StopSet::Compile(std::vector<std::string> strings) {
    std::size_t bytes = 0;
    for (const std::string& string : strings) {
        if (string.empty()) {
            return Error::Invalid("stop", "A stop string cannot be empty.");
        }
        bytes += string.size();
    }
    if (strings.size() > kMaxStopStrings) {
        return Error::Invalid("stop", "Too many stop strings: " + std::to_string(strings.size()) +
                                          " (at most " + std::to_string(kMaxStopStrings) + ").");
    }
    if (bytes > kMaxStopBytes) {
        return Error::Invalid("stop", "The stop strings are too long together: " + std::to_string(bytes) +
                                          " bytes (at most " + std::to_string(kMaxStopBytes) + ").");
    }
    auto set = std::shared_ptr<StopSet>{new StopSet};
    set->strings_ = std::move(strings);
    set->nodes_.reserve(bytes + 1);
    set->nodes_.emplace_back();
    for (std::size_t index = 0; index < set->strings_.size(); ++index) {
        std::int32_t node = 0;
        for (const char c : set->strings_[index]) {
            const auto byte = static_cast<unsigned char>(c);
            std::int32_t child = set->Child(node, byte);
            if (child < 0) {
                child = static_cast<std::int32_t>(set->nodes_.size());
                Node& made = set->nodes_.emplace_back();
                Node& parent = set->nodes_[static_cast<std::size_t>(node)];
                made.byte = byte;
                made.depth = parent.depth + 1;
                made.owner = static_cast<std::int32_t>(index);
                made.next_sibling = parent.first_child;
                parent.first_child = child;
                if (node == 0) {
                    set->root_[byte] = child;
                }
            }
            node = child;
        }
        Node& last = set->nodes_[static_cast<std::size_t>(node)];
        if (last.output < 0) {
            last.output = static_cast<std::int32_t>(index);  // the first of equal strings
        }
    }
    // Breadth first: a node's failure link is shorter than the node. The longest string ending at a node is
    // its own, else its link's.
    std::vector<std::int32_t> queue;
    queue.reserve(set->nodes_.size());
    queue.push_back(0);
    for (std::size_t head = 0; head < queue.size(); ++head) {
        const std::int32_t node = queue[head];
        for (std::int32_t child = set->nodes_[static_cast<std::size_t>(node)].first_child; child >= 0;
             child = set->nodes_[static_cast<std::size_t>(child)].next_sibling) {
            Node& made = set->nodes_[static_cast<std::size_t>(child)];
            made.fail =
                node == 0 ? 0 : set->Next(set->nodes_[static_cast<std::size_t>(node)].fail, made.byte);
            if (made.output < 0) {
                made.output = set->nodes_[static_cast<std::size_t>(made.fail)].output;
            }
            queue.push_back(child);
        }
    }
    return std::shared_ptr<const StopSet>{std::move(set)};
}

std::int32_t StopSet::Child(std::int32_t node, unsigned char byte) const noexcept {
    if (node == 0) {
        const std::int32_t child = root_[byte];
        return child == 0 ? -1 : child;
    }
    std::int32_t child = nodes_[static_cast<std::size_t>(node)].first_child;
    while (child >= 0 && nodes_[static_cast<std::size_t>(child)].byte != byte) {
        child = nodes_[static_cast<std::size_t>(child)].next_sibling;
    }
    return child;
}

std::int32_t StopSet::Next(std::int32_t node, unsigned char byte) const noexcept {
    while (true) {
        const std::int32_t child = Child(node, byte);
        if (child >= 0) {
            return child;
        }
        if (node == 0) {
            return 0;
        }
        node = nodes_[static_cast<std::size_t>(node)].fail;
    }
}

std::optional<StopMatcher::Match> StopMatcher::Append(std::string_view text, std::string& out) {
    if (set_ == nullptr || set_->empty()) {
        out.append(text);
        return std::nullopt;
    }
    const auto node = [&](std::int32_t at) -> const StopSet::Node& {
        return set_->nodes_[static_cast<std::size_t>(at)];
    };
    // Held bytes are the first `held` bytes of the string that owns the old state.
    const std::int32_t old_owner = node(state_).owner;
    const auto held = static_cast<std::size_t>(node(state_).depth);
    const auto show = [&](std::size_t count) {
        const std::size_t from_held = std::min(count, held);
        if (from_held > 0) {
            out.append(set_->strings_[static_cast<std::size_t>(old_owner)], 0, from_held);
        }
        out.append(text.substr(0, count - from_held));
    };

    std::int32_t state = state_;
    for (std::size_t at = 0; at < text.size(); ++at) {
        const auto byte = static_cast<unsigned char>(text[at]);
        if (state == 0) {
            state = set_->root_[byte];
            if (state == 0) {
                continue;
            }
        } else {
            state = set_->Next(state, byte);
        }
        const std::int32_t hit = node(state).output;
        if (hit >= 0) {
            const std::size_t end = held + at + 1;
            const std::size_t size = set_->strings_[static_cast<std::size_t>(hit)].size();
            show(include_ ? end : end - size);
            state_ = 0;
            return Match{static_cast<std::size_t>(hit)};
        }
    }
    state_ = state;
    show(held + text.size() - static_cast<std::size_t>(node(state).depth));
    return std::nullopt;
}

void StopMatcher::Flush(std::string& out) {
    if (set_ == nullptr || set_->empty()) {
        return;
    }
    const StopSet::Node& at = set_->nodes_[static_cast<std::size_t>(state_)];
    if (at.depth > 0) {
        out.append(set_->strings_[static_cast<std::size_t>(at.owner)], 0, static_cast<std::size_t>(at.depth));
    }
    state_ = 0;
}

}  // namespace rankgate::text

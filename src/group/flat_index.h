// SPDX-License-Identifier: Apache-2.0
// Open-addressing multimap from a 64-bit hash to a slot number. The caller compares the real key, so it
// stores no keys and, once grown, allocates nothing. Owned and called by GroupCore only; single-threaded.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/check.h"

namespace rankgate::group {

inline std::uint64_t Mix(std::uint64_t x) noexcept {
    x ^= x >> 30;
    x *= 0xbf58476d1ce4e5b9ULL;
    x ^= x >> 27;
    x *= 0x94d049bb133111ebULL;
    return x ^ (x >> 31);
}

class FlatIndex {
  public:
    static constexpr std::uint32_t kNone = 0xffffffff;

    FlatIndex() : cells_(16) {}

    void Insert(std::uint64_t hash, std::uint32_t value) {
        if ((size_ + 1) * 2 > cells_.size()) {
            Grow();
        }
        Put(cells_, hash, value);
        ++size_;
    }

    /// The first value under `hash` for which `same` holds, or kNone.
    template <class Same>
    std::uint32_t Find(std::uint64_t hash, Same&& same) const {
        const std::size_t mask = cells_.size() - 1;
        for (std::size_t i = hash & mask; cells_[i].value != kNone; i = (i + 1) & mask) {
            if (cells_[i].hash == hash && same(cells_[i].value)) {
                return cells_[i].value;
            }
        }
        return kNone;
    }

    /// Removes exactly (hash, value); false if it was not there.
    bool Erase(std::uint64_t hash, std::uint32_t value) noexcept {
        const std::size_t mask = cells_.size() - 1;
        std::size_t i = hash & mask;
        while (cells_[i].value != kNone && !(cells_[i].hash == hash && cells_[i].value == value)) {
            i = (i + 1) & mask;
        }
        if (cells_[i].value == kNone) {
            return false;
        }
        // Backward shift: no tombstones, so look-ups stay short for ever.
        for (std::size_t j = (i + 1) & mask; cells_[j].value != kNone; j = (j + 1) & mask) {
            const std::size_t home = cells_[j].hash & mask;
            if (((j - home) & mask) >= ((j - i) & mask)) {
                cells_[i] = cells_[j];
                i = j;
            }
        }
        cells_[i].value = kNone;
        --size_;
        return true;
    }

    std::size_t size() const noexcept { return size_; }

  private:
    struct Cell {
        std::uint64_t hash{0};
        std::uint32_t value{kNone};
    };

    static void Put(std::vector<Cell>& cells, std::uint64_t hash, std::uint32_t value) noexcept {
        const std::size_t mask = cells.size() - 1;
        std::size_t i = hash & mask;
        while (cells[i].value != kNone) {
            i = (i + 1) & mask;
        }
        cells[i] = {hash, value};
    }
    void Grow() {
        std::vector<Cell> bigger(cells_.size() * 2);
        for (const Cell& cell : cells_) {
            if (cell.value != kNone) {
                Put(bigger, cell.hash, cell.value);
            }
        }
        cells_.swap(bigger);
    }

    std::vector<Cell> cells_;
    std::size_t size_{0};
};

}  // namespace rankgate::group

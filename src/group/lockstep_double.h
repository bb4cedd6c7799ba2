// SPDX-License-Identifier: Apache-2.0
// A double of the data-parallel engine loop of vLLM (lockstep ranks without a coordinator), as pure rules on
// one rank's state. Tests only: the model checker runs them under every order of events,
// lockstep_double_test.cc runs them with the real core and the real sync intervals. Ranks really block on
// each other: a forward pass, a sync and a resume only end when all ranks are in them. The rules are those
// seen on vLLM 0.32.0; `starts_alone` and `sync_on_first` are the newer and older generations beside it.
#pragma once

#include <cstdint>

namespace rankgate::group {

struct EngineRules {
    int interval{16};          // an all-reduce every so many steps decides whether the wave goes on
    bool sync_on_first{true};  // and after the first step of a wave
    bool starts_alone{false};  // an ADD to a parked rank starts a wave and says start_wave
};

enum class EnginePhase : std::uint8_t {
    kTop,      // between steps: reads its input, or sleeps on it
    kForward,  // in a (real or dummy) step: waits for the others' step
    kSync,     // in the all-reduce after a step
    kResume    // in the barrier of resume_scheduler: reads nothing, answers nothing
};

enum class ResumeAnswer : std::uint8_t { kRefused, kNothingToDo, kBarrier };

struct EngineRank {
    std::int64_t wave{0};
    std::int32_t counter{0};
    EnginePhase phase{EnginePhase::kTop};
    bool running{false};
    bool paused{false};
    bool pending_pause{false};
    bool ignore_start{false};

    /// `work`: its scheduler holds an unfinished request.
    bool Counts(bool work) const noexcept { return work && !paused; }
    bool Runnable(bool work) const noexcept {
        return phase == EnginePhase::kTop && (running || Counts(work));
    }

    /// True: say start_wave(wave). `stamp` is the wave that the request carries.
    bool OnAdd(const EngineRules& rules, std::int64_t stamp) noexcept {
        if (!rules.starts_alone) {
            return false;  // without a coordinator the stamp is not even looked at
        }
        wave = stamp > wave ? stamp : wave;
        if (running || paused) {
            return false;
        }
        running = true;
        return true;
    }
    void OnStart(std::int64_t number) noexcept {
        if (!ignore_start && number >= wave) {
            wave = number;
            running = true;
        }
    }
    void OnPause() noexcept {
        paused = true;
        pending_pause = true;
        running = true;  // to reach a consensus
    }
    ResumeAnswer OnResume() noexcept {
        if (pending_pause) {
            return ResumeAnswer::kRefused;
        }
        if (running) {
            return ResumeAnswer::kNothingToDo;
        }
        paused = false;
        ignore_start = false;
        phase = EnginePhase::kResume;
        return ResumeAnswer::kBarrier;
    }
    void EnterForward() noexcept { phase = EnginePhase::kForward; }

    /// After the step, before the next loop: to the all-reduce or straight on.
    void LeaveForward(const EngineRules& rules) noexcept {
        ++counter;
        if (counter == 2 * rules.interval) {
            counter = rules.interval;  // only its remainder, and whether it is the first, matter
        }
        const bool sync = (rules.sync_on_first && counter == 1) || counter % rules.interval == 0;
        phase = sync ? EnginePhase::kSync : EnginePhase::kTop;
        running = running || !sync;
    }
    /// The all-reduce came back. True: this rank parks and reports `completed`.
    bool LeaveSync(bool unfinished_anywhere, bool all_pause, std::int64_t& completed) noexcept {
        phase = EnginePhase::kTop;
        running = unfinished_anywhere;
        if (all_pause) {
            ignore_start = true;
            pending_pause = false;
        }
        if (running) {
            return false;
        }
        completed = wave++;
        counter = 0;
        return true;
    }
    void LeaveResume(bool work_anywhere) noexcept {
        phase = EnginePhase::kTop;
        running = work_anywhere;
    }
};

/// What the all-reduce of `size` ranks decides from the sums of their two flags.
inline bool WaveGoesOn(int unfinished, int pending_pause, int size) noexcept {
    return unfinished > 0 || pending_pause % size != 0;
}

}  // namespace rankgate::group

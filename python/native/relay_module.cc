// SPDX-License-Identifier: Apache-2.0
// The Python face of src/relay: module rankgate.relay._native. Every call that can wait releases the GIL and
// looks for Python signals at least five times a second and on EINTR, so that Ctrl-C is KeyboardInterrupt
// inside join, publish, next_step and finish. Lifetime: an endpoint object closes itself when it is
// collected; what is left at interpreter exit is closed by close_all(), which also waits for the calls of
// other (daemon) threads: a thread that asks for the GIL of an ending interpreter is unwound through C++.
#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <pthread.h>

#include <atomic>
#include <chrono>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "relay/relay.h"

namespace nb = nanobind;
namespace relay = rankgate::relay;

namespace {

/// An instance of the right subclass of RelayError.
nb::object MakeError(const relay::Failure& failure) {
    nb::object make = nb::module_::import_("rankgate.relay.errors").attr("make_error");
    const std::string_view text = failure.text_view();
    // Another process may have written the text: never let bytes that are no UTF-8 spoil the report.
    nb::object message =
        nb::steal(PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "replace"));
    return make(std::string{relay::CodeName(failure.code)}, message,
                failure.origin_rank >= 0 ? nb::object(nb::int_(failure.origin_rank)) : nb::none(),
                std::string{relay::PhaseName(failure.phase)},
                failure.step != 0 ? nb::object(nb::int_(failure.step)) : nb::none(),
                failure.deadline_s >= 0 ? nb::object(nb::float_(failure.deadline_s)) : nb::none(),
                failure.MissingRanks());
}

[[noreturn]] void Raise(const relay::Failure& failure) {
    nb::object error = MakeError(failure);
    PyErr_SetObject(error.type().ptr(), error.ptr());
    throw nb::python_error();
}

/// Runs pending Python signal handlers; true if one of them raised (the error stays set).
bool CheckSignals() {
    nb::gil_scoped_acquire gil;
    return PyErr_CheckSignals() != 0;
}
const relay::InterruptCheck kSignals{&CheckSignals};

[[noreturn]] void RaisePending() {
    if (PyErr_Occurred() == nullptr) {
        PyErr_SetNone(PyExc_KeyboardInterrupt);
    }
    throw nb::python_error();
}

/// Set by close_all(), under the GIL: the interpreter is ending. From then on only the thread that ends it
/// may give up the GIL; any other one might never get it back.
std::atomic<bool> g_ending{false};
std::thread::id g_ending_thread;
std::atomic<int> g_calls{0};
PyObject* g_closed_error = nullptr;  // made beforehand: no Python code may run for it any more
constexpr std::chrono::seconds kLastCalls{2};

bool TooLate() {
    return g_ending && std::this_thread::get_id() != g_ending_thread;
}

/// A call from Python, from its first statement until its result or error is set.
class InCall {
  public:
    InCall() {
        if (TooLate()) {
            PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(g_closed_error)), g_closed_error);
            throw nb::python_error();
        }
        g_calls.fetch_add(1);
    }
    ~InCall() { g_calls.fetch_sub(1); }
    InCall(const InCall&) = delete;
    InCall& operator=(const InCall&) = delete;
};

template <class T>
T Attribute(nb::handle object, const char* name) {
    return nb::cast<T>(object.attr(name));
}

/// From the Python dataclass, which has checked the types; the values are checked here.
relay::Config ReadConfig(nb::handle py) {
    relay::Config config;
    config.rank = Attribute<int>(py, "rank");
    config.size = Attribute<int>(py, "size");
    config.where = Attribute<std::string>(py, "where");
    config.epoch = Attribute<std::uint64_t>(py, "epoch");
    config.join = relay::Seconds{Attribute<double>(py, "join_s")};
    config.publish_stall = relay::Seconds{Attribute<double>(py, "publish_stall_s")};
    config.stall_after = relay::Seconds{Attribute<double>(py, "stall_after_s")};
    config.beat = relay::Seconds{Attribute<double>(py, "beat_s")};
    config.max_lag_steps = Attribute<int>(py, "max_lag_steps");
    config.max_frame = Attribute<std::size_t>(py, "max_frame");
    config.digest = Attribute<bool>(py, "digest");
    config.exit_after = relay::Seconds{Attribute<double>(py, "exit_after_s")};
    config.guard_fd = Attribute<int>(py, "guard_fd");
    config.parent_death_signal = Attribute<int>(py, "parent_death_signal");
    config.spin_us = Attribute<int>(py, "spin_us");
    const auto backend = Attribute<std::string>(py, "backend");
    if (backend == "ring") {
        config.backend = relay::Backend::kRing;
    } else if (backend == "stream") {
        config.backend = relay::Backend::kStream;
    } else if (backend == "tcp") {
        config.backend = relay::Backend::kTcp;
    } else {
        throw std::invalid_argument("backend: must be ring, stream or tcp");
    }
    if (std::string why = config.Validate(); !why.empty()) {
        throw std::invalid_argument(why);
    }
    return config;
}

void ValidateConfig(nb::handle py) {
    ReadConfig(py);
}

/// The bytes of one frame; keeps the step alive for as long as a memoryview of it lives.
struct FrameView {
    nb::object step;
    relay::Frame frame;
};

int GetBuffer(PyObject* self, Py_buffer* view, int flags) {
    const auto* frame = nb::inst_ptr<FrameView>(self);
    return PyBuffer_FillInfo(view, self, const_cast<std::byte*>(frame->frame.data()),
                             static_cast<Py_ssize_t>(frame->frame.size()), 1, flags);
}
PyType_Slot kFrameSlots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(&GetBuffer)}, {0, nullptr}};

nb::object ViewOf(nb::handle self, std::size_t index) {
    const auto& step = nb::cast<const relay::Step&>(self);
    nb::object frame = nb::cast(FrameView{nb::borrow(self), step[index]});
    nb::object view = nb::steal(PyMemoryView_FromObject(frame.ptr()));
    if (!view.is_valid()) {
        throw nb::python_error();
    }
    return view;
}

nb::list AllViews(nb::handle self) {
    nb::list views;
    const std::size_t n = nb::cast<const relay::Step&>(self).size();
    for (std::size_t i = 0; i < n; ++i) {
        views.append(ViewOf(self, i));
    }
    return views;
}

/// The buffers of a publish call, held while the GIL is not.
class Buffers {
  public:
    explicit Buffers(nb::handle frames) {
        nb::object fast =
            nb::steal(PySequence_Fast(frames.ptr(), "frames must be a sequence of bytes-like objects"));
        if (!fast.is_valid()) {
            throw nb::python_error();
        }
        const Py_ssize_t n = PySequence_Fast_GET_SIZE(fast.ptr());
        views_.reserve(static_cast<std::size_t>(n));
        frames_.reserve(static_cast<std::size_t>(n));
        for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(fast.ptr()); ++i) {
            Py_buffer view;
            if (PyObject_GetBuffer(PySequence_Fast_GET_ITEM(fast.ptr(), i), &view, PyBUF_SIMPLE) != 0) {
                Release();
                throw nb::python_error();
            }
            views_.push_back(view);
            frames_.emplace_back(static_cast<const std::byte*>(view.buf), static_cast<std::size_t>(view.len));
        }
    }
    ~Buffers() { Release(); }
    Buffers(const Buffers&) = delete;
    Buffers& operator=(const Buffers&) = delete;
    std::span<const relay::Frame> frames() const { return frames_; }

  private:
    void Release() {
        for (Py_buffer& view : views_) {
            PyBuffer_Release(&view);
        }
        views_.clear();
    }
    std::vector<Py_buffer> views_;
    std::vector<relay::Frame> frames_;
};

/// Python's side of one end. The registry (under the GIL) serves close_all().
template <class End>
class PyEnd;
struct Registered {
    virtual ~Registered() = default;
    virtual void Close() = 0;
};
std::set<Registered*>& Registry() {
    static auto* set = new std::set<Registered*>;  // never destroyed: objects may outlive static destruction
    return *set;
}

template <class End>
class PyEnd final : public Registered {
  public:
    explicit PyEnd(nb::object config) : config_{std::move(config)}, on_failure_{config_.attr("on_failure")} {
        const InCall call;
        relay::Config native = ReadConfig(config_);
        if (!on_failure_.is_none()) {
            // The pointer is borrowed: this object outlives the monitor thread that calls.
            native.on_failure = [callback = on_failure_.ptr()](const relay::Failure& failure) {
                nb::gil_scoped_acquire gil;
                try {
                    nb::borrow(callback)(MakeError(failure));
                } catch (nb::python_error& error) {
                    error.discard_as_unraisable("rankgate.relay on_failure");
                }
            };
        }
        end_ = std::make_unique<End>(std::move(native));
        Registry().insert(this);
    }
    ~PyEnd() override {
        Registry().erase(this);
        if (TooLate()) {
            end_.reset();  // close_all() has closed it: nothing to wait for
            return;
        }
        const InCall call;
        nb::gil_scoped_release release;
        end_.reset();
    }

    void Close() override {
        if (TooLate()) {
            return;
        }
        const InCall call;
        nb::gil_scoped_release release;
        end_->Close();
    }
    /// For the cycle collector: an engine that owns its end and is called by it (on_failure).
    int Traverse(visitproc visit, void* arg) {
        Py_VISIT(config_.ptr());
        Py_VISIT(on_failure_.ptr());
        return 0;
    }
    void Clear() {
        Close();  // the monitor thread borrows the callback
        config_.reset();
        on_failure_.reset();
    }
    nb::object Join() {
        const InCall call;
        std::optional<relay::Result<std::optional<relay::JoinReport>>> result;
        {
            nb::gil_scoped_release release;
            result.emplace(end_->Join(kSignals));
        }
        if (!*result) {
            Raise(result->failure());
        }
        if (!**result) {
            RaisePending();
        }
        return nb::cast(std::move(***result));
    }
    void Check() const {
        const InCall call;
        if (std::optional<relay::Failure> failure = end_->failure()) {
            Raise(*failure);
        }
    }
    nb::object Failure() const {
        const InCall call;
        const std::optional<relay::Failure> failure = end_->failure();
        return failure ? MakeError(*failure) : nb::none();
    }
    int FailureFd() const { return end_->failure_fd(); }
    void Fail(const std::string& code, const std::string& text) {
        const InCall call;
        const std::optional<relay::Code> value = relay::CodeFromName(code);
        if (!value || *value == relay::Code::kOk || *value == relay::Code::kClosed ||
            *value == relay::Code::kTooLarge) {
            throw std::invalid_argument("code: " + code + " is not a failure a rank can declare");
        }
        nb::gil_scoped_release release;
        end_->Fail(*value, text);
    }
    void SetDigest(nb::handle value) {
        const InCall call;
        const nb::object index = nb::steal(PyNumber_Index(value.ptr()));  // numpy's integers, too
        if (!index.is_valid()) {
            throw nb::python_error();
        }
        const unsigned long long digest = PyLong_AsUnsignedLongLongMask(index.ptr());
        std::optional<relay::Status> status;
        {
            nb::gil_scoped_release release;
            status.emplace(end_->SetDigest(digest));
        }
        if (!*status) {
            Raise(status->failure());
        }
    }
    void Finish(double timeout_s) {
        const InCall call;
        if (!(timeout_s >= 0 && timeout_s <= 86400)) {
            throw std::invalid_argument("timeout_s: must be in 0..86400 seconds");
        }
        std::optional<relay::Result<relay::Wait>> result;
        {
            nb::gil_scoped_release release;
            result.emplace(end_->Finish(relay::Seconds{timeout_s}, kSignals));
        }
        if (!*result) {
            Raise(result->failure());
        }
        if (**result == relay::Wait::kInterrupted) {
            RaisePending();
        }
    }
    std::map<int, double> BeatAges() const {
        std::map<int, double> ages;
        const std::vector<double> all = end_->BeatAges();
        for (std::size_t r = 0; r < all.size(); ++r) {
            ages[static_cast<int>(r)] = all[r];
        }
        return ages;
    }
    nb::object config() const { return config_.is_valid() ? config_ : nb::none(); }
    End& end() { return *end_; }

  private:
    nb::object config_;
    nb::object on_failure_;
    std::unique_ptr<End> end_;
};

std::uint64_t Publish(PyEnd<relay::Leader>& self, nb::handle frames) {
    const InCall call;
    const Buffers buffers{frames};
    std::uint64_t number = 0;
    std::optional<relay::Result<relay::Wait>> result;
    {
        nb::gil_scoped_release release;
        result.emplace(self.end().Publish(buffers.frames(), &number, kSignals));
    }
    if (!*result) {
        Raise(result->failure());
    }
    if (**result != relay::Wait::kReady) {
        RaisePending();
    }
    return number;
}

relay::Step NextStep(PyEnd<relay::Follower>& self, std::optional<double> timeout_s) {
    const InCall call;
    relay::Step step;
    std::optional<relay::Seconds> timeout;
    if (timeout_s) {
        if (!(*timeout_s >= 0)) {
            throw std::invalid_argument("timeout_s: must not be negative");
        }
        timeout = relay::Seconds{*timeout_s};
    }
    std::optional<relay::Result<relay::Wait>> result;
    {
        nb::gil_scoped_release release;
        result.emplace(self.end().NextStep(timeout, &step, kSignals));
    }
    if (!*result) {
        Raise(result->failure());
    }
    switch (**result) {
        case relay::Wait::kReady:
            break;
        case relay::Wait::kTimeout:
            PyErr_Format(PyExc_TimeoutError, "no step within timeout_s");
            throw nb::python_error();
        case relay::Wait::kInterrupted:
            RaisePending();
    }
    return step;
}

nb::object TryNextStep(PyEnd<relay::Follower>& self) {
    const InCall call;
    relay::Step step;
    std::optional<relay::Result<bool>> result;
    {
        nb::gil_scoped_release release;
        result.emplace(self.end().TryNextStep(&step));
    }
    if (!*result) {
        Raise(result->failure());
    }
    return **result ? nb::cast(std::move(step)) : nb::none();
}

template <class End>
int TraverseEnd(PyObject* self, visitproc visit, void* arg) {
    Py_VISIT(Py_TYPE(self));
    return nb::inst_ready(self) ? nb::inst_ptr<PyEnd<End>>(self)->Traverse(visit, arg) : 0;
}
template <class End>
int ClearEnd(PyObject* self) {
    if (nb::inst_ready(self)) {
        nb::inst_ptr<PyEnd<End>>(self)->Clear();
    }
    return 0;
}
template <class End>
PyType_Slot kEndSlots[] = {{Py_tp_traverse, reinterpret_cast<void*>(&TraverseEnd<End>)},
                           {Py_tp_clear, reinterpret_cast<void*>(&ClearEnd<End>)},
                           {0, nullptr}};

/// At interpreter exit: nobody waits any more, no thread of the relay runs, no other thread is inside a call.
void CloseAll() {
    if (!g_ending) {
        relay::Failure closed;
        closed.code = relay::Code::kClosed;
        closed.phase = relay::Phase::kClose;
        closed.SetText("the interpreter is ending");
        g_closed_error = MakeError(closed).release().ptr();
        g_ending_thread = std::this_thread::get_id();
        g_ending = true;
    }
    const std::vector<Registered*> all{Registry().begin(), Registry().end()};
    for (Registered* end : all) {
        if (Registry().count(end) != 0) {
            end->Close();
        }
    }
    nb::gil_scoped_release release;
    const auto until = std::chrono::steady_clock::now() + kLastCalls;
    while (g_calls > 0 && std::chrono::steady_clock::now() < until) {
        std::this_thread::sleep_for(std::chrono::milliseconds{1});
    }
}

template <class End, class Class>
void BindEnd(Class& c) {
    using Self = PyEnd<End>;
    c.def(nb::init<nb::object>(), nb::arg("config"), nb::sig("def __init__(self, config: Config) -> None"))
        .def("join", &Self::Join, nb::sig("def join(self) -> JoinReport"),
             "Wait until every rank is in (Config.join_s on every rank). Returns a JoinReport.\n\n"
             "Raises JoinTimeout with the missing ranks on every rank that is present, BadEpoch, "
             "VersionMismatch or DuplicateRank\n"
             "where this rank does not belong to the group.")
        .def("check", &Self::Check, "Raise the recorded failure of the group, if there is one.")
        .def_prop_ro("failure", &Self::Failure, nb::sig("def failure(self) -> RelayError | None"),
                     "The recorded failure of the group as a RelayError, or None.")
        .def("failure_fd", &Self::FailureFd,
             "A descriptor that becomes readable with the first failure and stays so; put it into the poller "
             "that waits for requests.\n"
             "It belongs to this object: do not close it or read from it.")
        .def("fail", &Self::Fail, nb::arg("code"), nb::arg("text") = "",
             "End the group with this code (e.g. \"remote_failure\") and text. The first cause wins; every "
             "rank raises it.")
        .def("set_digest", &Self::SetDigest, nb::arg("value"),
             nb::sig("def set_digest(self, value: int) -> None"),
             "A hash (64 bit) of this rank's state after the step just published or read. Needs "
             "Config.digest; ranks that differ end\n"
             "the group with Diverged at that step.")
        .def("finish", &Self::Finish, nb::arg("timeout_s") = 5.0,
             "The orderly end: every rank calls it and returns once all have. Afterwards a closed socket is "
             "no death.\n"
             "A rank that does not come in time ends the group with PeerStalled (phase finish, missing "
             "ranks).")
        .def("beat_ages", &Self::BeatAges,
             "Seconds since each watched rank last showed life, by rank. For reports while "
             "Config.stall_after_s is 0.")
        .def("close", &Self::Close,
             "Release everything. Without finish() the other ranks see this one die. Wakes a call that waits "
             "in another thread.")
        .def_prop_ro("config", &Self::config, "The Config this end was made with.")
        .def("__enter__", [](nb::object self) { return self; })
        .def(
            "__exit__", [](Self& self, nb::args) { self.Close(); }, "Calls close(), not finish().");
}

}  // namespace

NB_MODULE(_native, m) {
    m.doc() = "C++ core of rankgate.relay; import rankgate.relay instead.";
    nb::set_leak_warnings(false);
    ::pthread_atfork(nullptr, nullptr,
                     [] { g_calls = 0; });  // a child has none of its parent's other threads

    nb::class_<relay::JoinReport>(m, "JoinReport", "How the join went.")
        .def_ro("elapsed_s", &relay::JoinReport::elapsed_s, "Seconds that join() took here.")
        .def_prop_ro(
            "rank_s",
            [](const relay::JoinReport& report) {
                std::map<int, double> by_rank;
                for (const auto& [rank, s] : report.rank_s) {
                    by_rank[rank] = s;
                }
                return by_rank;
            },
            "Seconds until each rank was in, by rank. A follower knows only rank 0 and itself.")
        .def("__repr__", [](const relay::JoinReport& report) {
            return "JoinReport(elapsed_s=" + std::to_string(report.elapsed_s) + ")";
        });

    nb::class_<FrameView>(m, "_Frame", nb::type_slots(kFrameSlots));

    nb::class_<relay::Step>(
        m, "Step", "One step: a sequence of read-only buffers that live as long as the step or a view of it.")
        .def_prop_ro("number", &relay::Step::number, "The step's number, from 1.")
        .def("__len__", &relay::Step::size)
        .def("__getitem__",
             [](nb::handle self, Py_ssize_t index) {
                 const auto n = static_cast<Py_ssize_t>(nb::cast<const relay::Step&>(self).size());
                 if (index < 0) {
                     index += n;
                 }
                 if (index < 0 || index >= n) {
                     throw nb::index_error("step index out of range");
                 }
                 return ViewOf(self, static_cast<std::size_t>(index));
             })
        .def("__getitem__",
             [](nb::handle self, nb::slice slice) {
                 return nb::steal(PyObject_GetItem(AllViews(self).ptr(), slice.ptr()));
             })
        .def("__iter__", [](nb::handle self) { return nb::steal(PyObject_GetIter(AllViews(self).ptr())); })
        .def("__repr__", [](const relay::Step& step) {
            return "Step(number=" + std::to_string(step.number()) +
                   ", frames=" + std::to_string(step.size()) + ")";
        });

    auto leader = nb::class_<PyEnd<relay::Leader>>(
        m, "Leader", nb::is_weak_referenceable(), nb::type_slots(kEndSlots<relay::Leader>),
        "Rank 0: publishes steps to every follower. One thread publishes at a time.");
    BindEnd<relay::Leader>(leader);
    leader.def("publish", &Publish, nb::arg("frames"),
               nb::sig("def publish(self, frames: Sequence[Buffer]) -> int"),
               "Publish one step of bytes-like frames, the empty list included; returns its number, from 1. "
               "Never drops a step: waits\n"
               "while the slowest follower is Config.max_lag_steps behind. A frame above Config.max_frame "
               "raises TooLarge and sends\n"
               "nothing; the group goes on.");

    auto follower = nb::class_<PyEnd<relay::Follower>>(m, "Follower", nb::is_weak_referenceable(),
                                                       nb::type_slots(kEndSlots<relay::Follower>),
                                                       "A rank 1..N-1: receives every step, in order.");
    BindEnd<relay::Follower>(follower);
    follower
        .def("next_step", &NextStep, nb::arg("timeout_s") = nb::none(),
             nb::sig("def next_step(self, timeout_s: float | None = None) -> Step"),
             "The next whole step. None waits as long as rank 0 lives; otherwise TimeoutError, which is no "
             "failure. Closed once rank 0\n"
             "has finished and every step was read.")
        .def("try_next_step", &TryNextStep, nb::sig("def try_next_step(self) -> Step | None"),
             "The next step if it is there, else None. Never waits.");

    m.def("validate", &ValidateConfig);
    m.def("close_all", &CloseAll);
}

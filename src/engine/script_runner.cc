// SPDX-License-Identifier: Apache-2.0
#include "engine/script_runner.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <boost/json.hpp>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <utility>

#include "base/log.h"

namespace rankgate::engine {

namespace json = boost::json;
using wire::FinishReason;

namespace {

constexpr std::size_t kMaxLine = 8U << 20;
constexpr std::size_t kMaxPeers = 16;
constexpr std::size_t kMaxSeen = 100'000;
constexpr std::size_t kMaxRules = 10'000;
constexpr int kNothingToSayMs = 2;

std::optional<FinishReason> FinishOf(std::string_view name) {
    if (name == "stop") return FinishReason::kStop;
    if (name == "length") return FinishReason::kLength;
    if (name == "abort") return FinishReason::kAbort;
    if (name == "error") return FinishReason::kError;
    if (name == "repetition") return FinishReason::kRepetition;
    return std::nullopt;
}

Error Bad(const std::string& text) {
    return Error::Invalid("script", text);
}

std::optional<std::string> Unhex(std::string_view hex) {
    std::string bytes;
    if (hex.size() % 2 != 0) {
        return std::nullopt;
    }
    const auto digit = [](char c) {
        return c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
    };
    for (std::size_t i = 0; i < hex.size(); i += 2) {
        const int high = digit(hex[i]);
        const int low = digit(hex[i + 1]);
        if (high < 0 || low < 0) {
            return std::nullopt;
        }
        bytes.push_back(static_cast<char>(high * 16 + low));
    }
    return bytes;
}

std::int64_t IntOr(const json::object& object, std::string_view key, std::int64_t fallback) {
    const json::value* value = object.if_contains(key);
    return value != nullptr && value->is_int64() ? value->get_int64() : fallback;
}

Duration MsOr(const json::object& object, std::string_view key) {
    const json::value* value = object.if_contains(key);
    if (value == nullptr || !value->is_number()) {
        return Duration{0};
    }
    return std::chrono::duration_cast<Duration>(
        std::chrono::duration<double, std::milli>(value->to_number<double>()));
}

Result<std::vector<TokenId>> Tokens(const json::value& value) {
    std::vector<TokenId> tokens;
    if (!value.is_array()) {
        return Bad("token lists are arrays of integers");
    }
    for (const json::value& element : value.get_array()) {
        if (!element.is_int64()) {
            return Bad("token lists are arrays of integers");
        }
        tokens.push_back(static_cast<TokenId>(element.get_int64()));
    }
    return tokens;
}

Result<Fault> FaultOf(const json::object& object) {
    const json::value* name = object.if_contains("do");
    if (name == nullptr || !name->is_string()) {
        return Bad("\"do\" names what shall happen");
    }
    const std::string_view what = name->get_string();
    Fault fault;
    if (what == "die") {
        fault.kind = Fault::Kind::kDie;
        fault.number = IntOr(object, "signal", 9);
    } else if (what == "exit") {
        fault.kind = Fault::Kind::kExit;
        fault.number = IntOr(object, "code", 0);
    } else if (what == "last_words") {
        fault.kind = Fault::Kind::kLastWords;
    } else if (what == "deaf") {
        fault.kind = Fault::Kind::kDeaf;
    } else if (what == "mute") {
        fault.kind = Fault::Kind::kMute;
    } else if (what == "identity") {
        fault.kind = Fault::Kind::kIdentity;
        fault.number = IntOr(object, "index", 0);
    } else if (what == "sleep") {
        fault.kind = Fault::Kind::kSleep;
        fault.number = IntOr(object, "ms", 1000);
    } else if (what == "raw") {
        fault.kind = Fault::Kind::kRawMessage;
        fault.number = IntOr(object, "client", 0);
        const json::value* frames = object.if_contains("hex");
        if (frames == nullptr || !frames->is_array()) {
            return Bad("raw wants \"hex\": [\"frame\", ...]");
        }
        for (const json::value& frame : frames->get_array()) {
            std::optional<std::string> bytes = frame.is_string() ? Unhex(frame.get_string()) : std::nullopt;
            if (!bytes.has_value()) {
                return Bad("raw wants lower-case hex strings");
            }
            fault.frames.push_back(std::move(*bytes));
        }
    } else {
        return Bad("unknown \"do\": " + std::string{what});
    }
    return fault;
}

Result<std::shared_ptr<ScriptRule>> RuleOf(const json::object& object) {
    static constexpr std::string_view kKeys[] = {
        "id_prefix",   "prompt",         "nth",      "times", "tokens",   "repeat", "finish",
        "stop_reason", "first_after_ms", "every_ms", "hold",  "at_token", "then"};
    for (const auto& member : object) {
        if (std::find(std::begin(kKeys), std::end(kKeys), std::string_view{member.key()}) ==
            std::end(kKeys)) {
            return Bad("unknown rule key " + std::string{member.key()});
        }
    }
    auto rule = std::make_shared<ScriptRule>();
    if (const json::value* value = object.if_contains("id_prefix"); value != nullptr && value->is_string()) {
        rule->id_prefix = std::string{value->get_string()};
    }
    if (const json::value* value = object.if_contains("prompt")) {
        Result<std::vector<TokenId>> tokens = Tokens(*value);
        if (!tokens.ok()) {
            return tokens.error();
        }
        rule->prompt = std::move(*tokens);
    }
    if (const json::value* value = object.if_contains("tokens")) {
        Result<std::vector<TokenId>> tokens = Tokens(*value);
        if (!tokens.ok()) {
            return tokens.error();
        }
        rule->tokens = std::move(*tokens);
    }
    if (const json::value* value = object.if_contains("finish")) {
        const std::optional<FinishReason> finish =
            value->is_string() ? FinishOf(value->get_string()) : std::nullopt;
        if (!finish.has_value()) {
            return Bad("finish is stop, length, abort, error or repetition");
        }
        rule->finish = *finish;
    }
    if (const json::value* value = object.if_contains("stop_reason")) {
        if (value->is_int64()) {
            rule->stop_reason = value->get_int64();
        } else if (value->is_string()) {
            rule->stop_reason = std::string{value->get_string()};
        }
    }
    rule->nth = IntOr(object, "nth", 0);
    rule->times = IntOr(object, "times", -1);
    rule->at_token = IntOr(object, "at_token", -1);
    rule->first_after = MsOr(object, "first_after_ms");
    rule->every = MsOr(object, "every_ms");
    const auto flag = [&](std::string_view key) {
        const json::value* value = object.if_contains(key);
        return value != nullptr && value->is_bool() && value->get_bool();
    };
    rule->repeat = flag("repeat");
    rule->hold = flag("hold");
    if (const json::value* value = object.if_contains("then")) {
        if (!value->is_object()) {
            return Bad("then is an object with \"do\"");
        }
        Result<Fault> fault = FaultOf(value->get_object());
        if (!fault.ok()) {
            return fault.error();
        }
        rule->then = std::move(*fault);
    }
    return rule;
}

}  // namespace

ScriptRunner::ScriptRunner(ScriptConfig config, const Clock& clock)
    : config_{std::move(config)}, clock_{clock} {}

ScriptRunner::~ScriptRunner() {
    if (listener_.valid()) {
        ::unlink(config_.socket_path.c_str());
    }
}

Status ScriptRunner::Open() {
    if (!config_.file.empty()) {
        std::ifstream in{config_.file};
        if (!in) {
            return Bad("--script " + config_.file + " cannot be read");
        }
        int number = 0;
        for (std::string line; std::getline(in, line);) {
            ++number;
            if (line.find_first_not_of(" \t\r") == std::string::npos || line.front() == '#') {
                continue;
            }
            const std::string answer = Execute(line);
            if (answer.find("\"ok\":true") == std::string::npos) {
                return Bad(config_.file + " line " + std::to_string(number) + ": " + answer);
            }
        }
    }
    if (!config_.socket_path.empty()) {
        sockaddr_un address{};
        address.sun_family = AF_UNIX;
        if (config_.socket_path.size() >= sizeof address.sun_path) {
            return Bad("--script-socket " + config_.socket_path + " is longer than " +
                       std::to_string(sizeof address.sun_path - 1) + " bytes");
        }
        std::memcpy(address.sun_path, config_.socket_path.c_str(), config_.socket_path.size());
        struct stat info {};
        if (::lstat(config_.socket_path.c_str(), &info) == 0 && S_ISSOCK(info.st_mode) &&
            info.st_uid == ::geteuid()) {
            ::unlink(config_.socket_path.c_str());
        }
        UniqueFd fd{::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)};
        if (!fd.valid() ||
            ::bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0 ||
            ::chmod(config_.socket_path.c_str(), 0600) != 0 || ::listen(fd.get(), 8) != 0) {
            return Bad("--script-socket " + config_.socket_path + ": cannot listen: " + std::strerror(errno));
        }
        listener_ = std::move(fd);
    }
    return Status::Ok();
}

std::string ScriptRunner::Execute(std::string_view line) {
    const auto fail = [](const std::string& why) {
        return json::serialize(json::object{{"ok", false}, {"error", why}});
    };
    boost::system::error_code failed;
    const json::value value = json::parse(json::string_view{line.data(), line.size()}, failed);
    if (failed || !value.is_object()) {
        return fail("not a JSON object");
    }
    const json::object& object = value.get_object();
    if (const json::value* rule = object.if_contains("rule")) {
        if (!rule->is_object()) {
            return fail("rule is an object");
        }
        Result<std::shared_ptr<ScriptRule>> made = RuleOf(rule->get_object());
        if (!made.ok()) {
            return fail(made.error().message);
        }
        if (rules_.size() >= kMaxRules) {
            return fail("too many rules");
        }
        const std::int64_t times = (*made)->times;
        rules_.emplace_back(std::move(*made), times);
    } else if (object.contains("do")) {
        const json::value& what = object.at("do");
        if (what.is_string() && what.get_string() == "release") {
            for (auto& [id, playing] : playing_) {
                playing.held = false;
            }
        } else if (what.is_string() && what.get_string() == "clear") {
            rules_.clear();
        } else if (what.is_string() && what.get_string() == "fail_step") {
            fatal_ = true;
        } else {
            Result<Fault> fault = FaultOf(object);
            if (!fault.ok()) {
                return fail(fault.error().message);
            }
            faults_.push_back(std::move(*fault));
        }
    } else if (const json::value* what = object.if_contains("get"); what != nullptr && what->is_string()) {
        json::array ids;
        for (const std::string& id : seen_) {
            ids.emplace_back(id);
        }
        return json::serialize(json::object{{"ok", true},
                                            {"requests", requests_},
                                            {"rules", static_cast<std::int64_t>(rules_.size())},
                                            {"ids", std::move(ids)}});
    } else {
        return fail("expected rule, do or get");
    }
    return R"({"ok":true})";
}

Status ScriptRunner::Check(const wire::GenerateRequest& request) noexcept {
    requests_ += 1;
    if (seen_.size() < kMaxSeen) {
        seen_.push_back(request.id);
    }
    Playing playing;
    playing.next = clock_.Now();
    for (auto& [rule, left] : rules_) {
        const bool prompt_fits =
            !rule->prompt.has_value() ||
            (rule->prompt->size() <= request.prompt_token_ids.size() &&
             std::equal(rule->prompt->begin(), rule->prompt->end(), request.prompt_token_ids.begin()));
        if (left == 0 || !request.id.starts_with(rule->id_prefix) || !prompt_fits ||
            (rule->nth != 0 && rule->nth != requests_)) {
            continue;
        }
        left -= left > 0 ? 1 : 0;
        playing.rule = rule;
        playing.held = rule->hold;
        playing.next += rule->first_after;
        if (rule->at_token == 0 && rule->then.has_value()) {
            faults_.push_back(*rule->then);
        }
        break;
    }
    playing_[request.id] = std::move(playing);
    return Status::Ok();
}

Placement ScriptRunner::Place(const Sequence& /*sequence*/,
                              std::span<const std::int32_t> free_slots) noexcept {
    return Placement{free_slots.back(), 0};
}

ItemResult ScriptRunner::Play(Playing& playing, const Sequence& sequence, TimePoint now) {
    ItemResult result;
    if (playing.held || now < playing.next) {
        result.kind = ItemResult::Kind::kNothing;
        return result;
    }
    const auto said = sequence.output.size();
    if (playing.rule == nullptr) {
        result.kind = ItemResult::Kind::kToken;
        result.token = static_cast<TokenId>(1000 + said % 1000);
        return result;
    }
    const ScriptRule& rule = *playing.rule;
    playing.next = std::max(playing.next + rule.every, now - rule.every);
    if (rule.tokens.empty() || (said >= rule.tokens.size() && !rule.repeat)) {
        if (rule.finish == FinishReason::kNone && rule.tokens.empty()) {
            result.kind = ItemResult::Kind::kToken;
            result.token = static_cast<TokenId>(1000 + said % 1000);
        } else if (rule.finish == FinishReason::kNone) {
            result.kind = ItemResult::Kind::kNothing;  // said everything and was not told to end: silence
        } else {
            result.kind = ItemResult::Kind::kFailed;
            result.finish = rule.finish;
        }
    } else {
        result.kind = ItemResult::Kind::kToken;
        result.token = rule.tokens[said % rule.tokens.size()];
        if (said + 1 == rule.tokens.size() && !rule.repeat) {
            result.finish = rule.finish;
        }
    }
    if (rule.then.has_value() && rule.at_token > 0 && static_cast<std::int64_t>(said) + 1 == rule.at_token) {
        faults_.push_back(*rule.then);
    }
    return result;
}

Status ScriptRunner::Run(const StepPlan& plan, StepResult& result) noexcept {
    const TimePoint now = clock_.Now();
    bool anything = false;
    for (const PlanItem& item : plan.items) {
        ItemResult outcome;
        const auto playing = playing_.find(item.sequence->request.id);
        if (item.sample && playing != playing_.end()) {
            outcome = Play(playing->second, *item.sequence, now);
            if (playing->second.rule != nullptr && outcome.finish != FinishReason::kNone) {
                item.sequence->stop_reason = playing->second.rule->stop_reason;
            }
        } else if (item.sample) {
            outcome.kind = ItemResult::Kind::kFailed;
        }
        anything = anything || outcome.kind != ItemResult::Kind::kNothing;
        result.items.push_back(outcome);
    }
    PollSocket(anything ? 0 : kNothingToSayMs);
    if (fatal_) {
        return Error{ErrorCode::kEngineError, "told to fail by the script", {}, false};
    }
    return Status::Ok();
}

bool ScriptRunner::TakeFault(Fault& out) {
    PollSocket(0);
    if (faults_.empty()) {
        return false;
    }
    out = std::move(faults_.front());
    faults_.pop_front();
    return true;
}

void ScriptRunner::PollSocket(int wait_ms) {
    std::vector<pollfd> polled;
    if (listener_.valid()) {
        polled.push_back(pollfd{listener_.get(), POLLIN, 0});
        for (const Peer& peer : peers_) {
            polled.push_back(pollfd{peer.fd.get(), POLLIN, 0});
        }
    }
    if (::poll(polled.data(), polled.size(), wait_ms) <= 0) {
        return;
    }
    for (std::size_t i = 1; i < polled.size(); ++i) {
        if (polled[i].revents != 0) {
            ServePeer(peers_[i - 1]);
        }
    }
    std::erase_if(peers_, [](const Peer& peer) { return !peer.fd.valid(); });
    if (polled[0].revents != 0) {
        UniqueFd fd{::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK)};
        if (fd.valid() && peers_.size() < kMaxPeers) {
            peers_.push_back(Peer{std::move(fd), {}});
        }
    }
}

void ScriptRunner::ServePeer(Peer& peer) {
    char buffer[65536];
    const ssize_t got = ::read(peer.fd.get(), buffer, sizeof buffer);
    if (got <= 0) {
        if (got == 0 || (errno != EAGAIN && errno != EINTR)) {
            peer.fd.reset();
        }
        return;
    }
    peer.pending.append(buffer, static_cast<std::size_t>(got));
    for (std::size_t end = peer.pending.find('\n'); end != std::string::npos; end = peer.pending.find('\n')) {
        const std::string answer = Execute(std::string_view{peer.pending}.substr(0, end)) + "\n";
        peer.pending.erase(0, end + 1);
        // A test reads its answers; one that does not loses them rather than stopping the rank.
        (void)!::send(peer.fd.get(), answer.data(), answer.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    }
    if (peer.pending.size() > kMaxLine) {
        peer.fd.reset();
    }
}

}  // namespace rankgate::engine

// SPDX-License-Identifier: Apache-2.0
// Result<T>: a value or an Error, for everything that input or the environment can make fail. Exceptions are
// kept for start-up (configuration) and never cross a callback, a coroutine or a C ABI. The table of codes
// with their HTTP face is errors.def.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <variant>

#include "base/check.h"

namespace rankgate {

enum class ErrorCode : std::uint8_t {
#define RG_ERROR(name, status, type, code) name,
#include "base/errors.def"
#undef RG_ERROR
};

/// HTTP status of a code.
int HttpStatus(ErrorCode code) noexcept;
/// Whose fault it is that a setting (an address, a path) cannot be used, by the errno of the call that tried:
/// kInvalidArgument if every later start with it would fail as well (the program then ends with 2),
/// kUnavailable if it is the state of the machine, such as a port that somebody else holds (ends with 1).
ErrorCode SettingError(int error) noexcept;
/// OpenAI `error.type` of a code.
std::string_view OpenAiType(ErrorCode code) noexcept;
/// OpenAI `error.code` of a code; empty means null.
std::string_view OpenAiCode(ErrorCode code) noexcept;

struct Error {
    ErrorCode code{ErrorCode::kInternal};
    std::string message;
    /// The request field the error is about (OpenAI `error.param`); empty means null.
    std::string param;
    /// True where the same request may succeed on another rank or a moment later. Of a kRankLost, false says
    /// that it may have been the request that the rank died of.
    bool retryable{false};

    static Error Invalid(std::string param_name, std::string text) {
        return Error{ErrorCode::kInvalidArgument, std::move(text), std::move(param_name), false};
    }
};

template <class T>
class [[nodiscard]] Result {
  public:
    Result(T value)
        : state_{std::in_place_index<0>, std::move(value)} {}  // NOLINT(google-explicit-constructor)
    Result(Error error)
        : state_{std::in_place_index<1>, std::move(error)} {}  // NOLINT(google-explicit-constructor)

    bool ok() const noexcept { return state_.index() == 0; }
    explicit operator bool() const noexcept { return ok(); }

    T& value() & {
        RG_CHECK(ok());
        return *std::get_if<0>(&state_);
    }
    const T& value() const& {
        RG_CHECK(ok());
        return *std::get_if<0>(&state_);
    }
    T&& value() && {
        RG_CHECK(ok());
        return std::move(*std::get_if<0>(&state_));
    }
    T& operator*() & { return value(); }
    const T& operator*() const& { return value(); }
    T&& operator*() && { return std::move(*this).value(); }
    T* operator->() { return &value(); }
    const T* operator->() const { return &value(); }

    const Error& error() const& {
        RG_CHECK(!ok());
        return *std::get_if<1>(&state_);
    }
    Error&& error() && {
        RG_CHECK(!ok());
        return std::move(*std::get_if<1>(&state_));
    }

  private:
    std::variant<T, Error> state_;
};

/// Success or an Error; the value-less Result.
class [[nodiscard]] Status {
  public:
    Status() = default;
    Status(Error error) : failed_{true}, error_{std::move(error)} {}  // NOLINT(google-explicit-constructor)

    static Status Ok() { return {}; }
    bool ok() const noexcept { return !failed_; }
    explicit operator bool() const noexcept { return ok(); }
    const Error& error() const& {
        RG_CHECK(failed_);
        return error_;
    }

  private:
    bool failed_{false};
    Error error_;
};

}  // namespace rankgate

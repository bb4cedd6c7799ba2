// SPDX-License-Identifier: Apache-2.0
#include "wire/test_vectors.h"

#include <boost/json.hpp>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <sstream>

#include "base/check.h"
#include "wire/msgpack.h"

namespace rankgate::wire::test {

namespace json = boost::json;

namespace {

std::string Text(const json::object& object, std::string_view key) {
    const json::value* value = object.if_contains(key);
    return value != nullptr && value->is_string() ? std::string{value->as_string()} : std::string{};
}

void Add(std::vector<Vector>& out, const json::object& object, const json::value& header,
         const std::string& prefix) {
    Vector base;
    base.name = prefix + Text(object, "name");
    base.direction = Text(object, "direction");
    base.socket = Text(object, "socket");
    base.outcome = Text(object, "outcome");
    base.note = Text(object, "note");
    base.header = header;
    if (const json::value* fields = object.if_contains("fields")) {
        base.fields = *fields;
    }
    if (const json::value* steps = object.if_contains("steps")) {
        int index = 0;
        for (const json::value& step : steps->as_array()) {
            Add(out, step.as_object(), header, base.name + "/" + std::to_string(index++));
        }
        return;
    }
    const json::value* frames = object.if_contains("frames_hex");
    if (frames == nullptr || frames->as_array().empty()) {
        if (frames != nullptr) {
            out.push_back(base);  // facts without frames, e.g. routing identities
        }
        return;
    }
    if (frames->as_array().front().is_array()) {  // a list of messages, each a list of frames
        int index = 0;
        for (const json::value& message : frames->as_array()) {
            Vector vector = base;
            vector.name += "/" + std::to_string(index++);
            for (const json::value& frame : message.as_array()) {
                vector.frames.push_back(FromHex(frame.as_string()));
            }
            out.push_back(std::move(vector));
        }
        return;
    }
    for (const json::value& frame : frames->as_array()) {
        base.frames.push_back(FromHex(frame.as_string()));
    }
    out.push_back(std::move(base));
}

json::value ReadJson(Reader& reader) {
    switch (reader.Peek()) {
        case MsgType::kNil:
            RG_CHECK(reader.ReadNil());
            return nullptr;
        case MsgType::kBool: {
            bool value = false;
            RG_CHECK(reader.ReadBool(value));
            return value;
        }
        case MsgType::kInt: {
            std::int64_t value = 0;
            if (reader.ReadInt(value)) {
                return value;
            }
            std::uint64_t wide = 0;
            RG_CHECK(reader.Recover() && reader.ReadUint(wide));
            return wide;
        }
        case MsgType::kFloat: {
            double value = 0;
            RG_CHECK(reader.ReadDouble(value));
            if (std::isnan(value)) {
                return "nan";
            }
            if (std::isinf(value)) {
                return value > 0 ? "inf" : "-inf";
            }
            return value;
        }
        case MsgType::kStr: {
            std::string_view value;
            RG_CHECK(reader.ReadStr(value));
            return json::value(value);
        }
        case MsgType::kBin: {
            std::string_view value;
            RG_CHECK(reader.ReadBin(value));
            return json::object{{"bin", ToHex(value)}};
        }
        case MsgType::kExt: {
            std::int8_t type = 0;
            std::string_view value;
            RG_CHECK(reader.ReadExt(type, value));
            return json::object{{"ext", type}, {"hex", ToHex(value)}};
        }
        case MsgType::kArray: {
            std::uint32_t count = 0;
            RG_CHECK(reader.ReadArray(count));
            json::array out;
            for (std::uint32_t i = 0; i < count; ++i) {
                out.push_back(ReadJson(reader));
            }
            return out;
        }
        case MsgType::kMap: {
            std::uint32_t count = 0;
            RG_CHECK(reader.ReadMap(count));
            json::object out;
            for (std::uint32_t i = 0; i < count; ++i) {
                json::value key = ReadJson(reader);
                const std::string name =
                    key.is_string() ? std::string{key.as_string()} : json::serialize(key);
                out[name] = ReadJson(reader);
            }
            return out;
        }
        default:
            break;
    }
    std::fprintf(stderr, "not msgpack\n");
    std::abort();
}

}  // namespace

std::vector<std::string_view> Vector::From(std::size_t first) const {
    std::vector<std::string_view> views;
    for (std::size_t i = first; i < frames.size(); ++i) {
        views.push_back(frames[i]);
    }
    return views;
}

std::vector<Vector> LoadVectors(std::string_view name) {
    const std::string path = std::string{RG_VECTORS_DIR} + "/" + std::string{name} + ".json";
    std::ifstream file{path};
    if (!file) {
        std::fprintf(stderr, "cannot open %s\n", path.c_str());
        std::abort();
    }
    std::stringstream text;
    text << file.rdbuf();
    const json::value root = json::parse(text.str());
    std::vector<Vector> out;
    if (root.is_array()) {
        for (const json::value& entry : root.as_array()) {
            Add(out, entry.as_object(), nullptr, "");
        }
    } else {
        for (const json::value& entry : root.at("vectors").as_array()) {
            Add(out, entry.as_object(), root.at("header"), "");
        }
    }
    RG_CHECK(!out.empty());
    return out;
}

std::string FromHex(std::string_view hex) {
    std::string out;
    int high = -1;
    for (const char c : hex) {
        int digit = 0;
        if (c >= '0' && c <= '9') {
            digit = c - '0';
        } else if (c >= 'a' && c <= 'f') {
            digit = c - 'a' + 10;
        } else {
            continue;  // blanks in hand-written bytes
        }
        if (high < 0) {
            high = digit;
        } else {
            out.push_back(static_cast<char>(high << 4 | digit));
            high = -1;
        }
    }
    RG_CHECK(high < 0);
    return out;
}

std::string ToHex(std::string_view bytes) {
    static constexpr char kDigits[] = "0123456789abcdef";
    std::string out;
    for (const char byte : bytes) {
        out.push_back(kDigits[static_cast<unsigned char>(byte) >> 4]);
        out.push_back(kDigits[static_cast<unsigned char>(byte) & 0xf]);
    }
    return out;
}

json::value ToJson(std::string_view msgpack) {
    Reader reader{msgpack};
    json::value value = ReadJson(reader);
    RG_CHECK(reader.Done());
    return value;
}

bool SameJson(const json::value& left, const json::value& right) {
    if (left.is_number() && right.is_number()) {
        if (!left.is_double() && !right.is_double()) {
            return left == right;
        }
        return left.to_number<double>() == right.to_number<double>();
    }
    if (left.is_array() && right.is_array()) {
        const json::array& a = left.as_array();
        const json::array& b = right.as_array();
        if (a.size() != b.size()) {
            return false;
        }
        for (std::size_t i = 0; i < a.size(); ++i) {
            if (!SameJson(a[i], b[i])) {
                return false;
            }
        }
        return true;
    }
    if (left.is_object() && right.is_object()) {
        const json::object& a = left.as_object();
        const json::object& b = right.as_object();
        if (a.size() != b.size()) {
            return false;
        }
        for (const auto& [key, value] : a) {
            const json::value* other = b.if_contains(key);
            if (other == nullptr || !SameJson(value, *other)) {
                return false;
            }
        }
        return true;
    }
    return left == right;
}

}  // namespace rankgate::wire::test

// SPDX-License-Identifier: Apache-2.0
// Fuzzes the reader itself: whatever the bytes, Skip, the typed reads and the JSON writer agree, stay inside
// the frame and end.
#include <cstddef>
#include <cstdint>
#include <string>

#include "base/check.h"
#include "wire/msgpack.h"
#include "wire/msgpack_json.h"

using namespace rankgate::wire;  // NOLINT(google-build-using-namespace)

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    const std::string_view bytes{reinterpret_cast<const char*>(data), size};
    Reader skipper{bytes};
    const bool skipped = skipper.Skip();
    Reader typed{bytes};
    std::string json;
    const bool written = AppendJson(typed, json);
    RG_CHECK(!written || skipped);
    if (written) {
        RG_CHECK(typed.offset() == skipper.offset());
    } else {
        RG_CHECK(json.empty());
    }
    // Every typed read either takes the value whole, as Skip would, or fails where it stood.
    Reader reader{bytes};
    for (int turns = 0; turns < 1000 && reader.ok() && reader.remaining() > 0; ++turns) {
        const std::size_t before = reader.offset();
        std::int64_t integer = 0;
        std::uint64_t wide = 0;
        double real = 0.0;
        bool flag = false;
        std::string_view view;
        std::int8_t type = 0;
        std::uint32_t count = 0;
        bool read = false;
        switch (turns % 9) {
            case 0:
                read = reader.ReadInt(integer);
                break;
            case 1:
                read = reader.ReadUint(wide);
                break;
            case 2:
                read = reader.ReadDouble(real);
                break;
            case 3:
                read = reader.ReadBool(flag);
                break;
            case 4:
                read = reader.ReadStr(view);
                break;
            case 5:
                read = reader.ReadBin(view);
                break;
            case 6:
                read = reader.ReadExt(type, view);
                break;
            case 7:
                read = reader.ReadArray(count);
                break;
            default:
                read = reader.ReadMap(count);
                break;
        }
        RG_CHECK(count <= size && view.size() <= size);
        if (read) {
            RG_CHECK(reader.offset() > before);
        } else {
            RG_CHECK(!reader.ok() && reader.offset() == before);
            if (!reader.Recover()) {
                break;
            }
            reader.Skip();
        }
    }
    return 0;
}

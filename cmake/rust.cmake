# Target `rg_tokenizer`: the tokenizer library of rust/tokenizer, built by cargo into build/rust (shared by all presets). Include it
# from a module's CMakeLists when RANKGATE_WITH_RUST is ON; including it twice is fine. About 150 CPU seconds once.
include_guard(GLOBAL)

find_program(RG_CARGO cargo)
if(NOT RG_CARGO)
    message(FATAL_ERROR "RANKGATE_WITH_RUST needs cargo >= 1.85 (Debian 12: apt install cargo-web). "
        "Without it, tokenizer.json models cannot be read; GGUF models work.")
endif()
execute_process(COMMAND ${RG_CARGO} --version OUTPUT_VARIABLE version OUTPUT_STRIP_TRAILING_WHITESPACE)
string(REGEX MATCH "[0-9]+\\.[0-9]+" version "${version}")
if(version VERSION_LESS 1.85)
    message(FATAL_ERROR "RANKGATE_WITH_RUST needs cargo >= 1.85, ${RG_CARGO} is ${version} (Debian 12: apt install cargo-web).")
endif()

set(RG_RUST_DIR ${CMAKE_SOURCE_DIR}/rust/tokenizer)
set(RG_RUST_OUT ${CMAKE_SOURCE_DIR}/build/rust)
# PCRE2_SYS_STATIC: with libpcre2-dev installed the archive would otherwise need -lpcre2-8.
add_custom_command(OUTPUT ${RG_RUST_OUT}/release/librg_tokenizer.a
    COMMAND ${CMAKE_COMMAND} -E env PCRE2_SYS_STATIC=1 ${RG_CARGO} build --release --locked
        --manifest-path ${RG_RUST_DIR}/Cargo.toml --target-dir ${RG_RUST_OUT}
    COMMAND ${CMAKE_COMMAND} -E touch ${RG_RUST_OUT}/release/librg_tokenizer.a
    DEPENDS ${RG_RUST_DIR}/Cargo.toml ${RG_RUST_DIR}/Cargo.lock ${RG_RUST_DIR}/src/lib.rs
    COMMENT "cargo build of the tokenizer library (about two minutes the first time)"
    USES_TERMINAL VERBATIM)
add_custom_target(rg_tokenizer_build DEPENDS ${RG_RUST_OUT}/release/librg_tokenizer.a)

add_library(rg_tokenizer STATIC IMPORTED GLOBAL)
file(MAKE_DIRECTORY ${RG_RUST_OUT}/release)
set_target_properties(rg_tokenizer PROPERTIES
    IMPORTED_LOCATION ${RG_RUST_OUT}/release/librg_tokenizer.a
    INTERFACE_INCLUDE_DIRECTORIES ${RG_RUST_DIR}
    INTERFACE_LINK_LIBRARIES "pthread;dl;m")
add_dependencies(rg_tokenizer rg_tokenizer_build)

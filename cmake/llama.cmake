# What is built from the llama.cpp source tree: `rg_jinja` (the chat template engine out of common/jinja, always, 10 s) and, with
# RANKGATE_WITH_LLAMA, `llama` (with ggml; include llama.h). A module includes this file and links the target; including it twice is fine.
#
# The source is not in this repository: scripts/fetch_llama.sh fetches the pinned tree and records its path in build/deps/llama.path.
# The switches are chosen so that logits do not depend on batch, chunking or thread count (docs/text.md, docs/engine.md): no tinyBLAS,
# no weight repacking. llama.cpp is always compiled with -O3 -DNDEBUG, whatever the preset, so that all presets share one ccache entry
# and give the same bits.
include_guard(GLOBAL)

function(rg_find_llama_source)
    set(record ${CMAKE_SOURCE_DIR}/build/deps/llama.path)
    execute_process(COMMAND ${CMAKE_SOURCE_DIR}/scripts/fetch_llama.sh
        OUTPUT_VARIABLE tree OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE failed)
    if(failed OR NOT EXISTS ${tree}/include/llama.h)
        message(FATAL_ERROR "No llama.cpp source (see the lines above): it is needed for chat templates and GGUF models. "
            "Install cargo >= 1.85 or python3-pip, or set RANKGATE_LLAMA_DIR to a llama.cpp tree.")
    endif()
    set_property(DIRECTORY ${CMAKE_SOURCE_DIR} APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${record})
    message(STATUS "llama.cpp source: ${tree}")
    set(RG_LLAMA_TREE ${tree} PARENT_SCOPE)
endfunction()

function(rg_add_llama tree)
    set(BUILD_SHARED_LIBS OFF)
    foreach(part COMMON TESTS TOOLS EXAMPLES SERVER APP UI)
        set(LLAMA_BUILD_${part} OFF)
    endforeach()
    set(LLAMA_OPENSSL OFF)
    set(LLAMA_ALL_WARNINGS OFF)
    set(GGML_LLAMAFILE OFF)
    set(GGML_CPU_REPACK OFF)
    # OpenMP's workers spin after each region; ggml's own pool is what the thread rule in docs/engine.md was measured with.
    set(GGML_OPENMP OFF)
    set(GGML_CCACHE OFF) # the launcher is set by the preset
    option(GGML_NATIVE "ggml: code for this machine's CPU (OFF for packages that travel)" ON)
    set(CMAKE_POLICY_DEFAULT_CMP0077 NEW) # let the plain set() above win over option() in there
    foreach(language C CXX)
        foreach(type DEBUG RELEASE RELWITHDEBINFO MINSIZEREL)
            set(CMAKE_${language}_FLAGS_${type} "-O3 -DNDEBUG")
        endforeach()
    endforeach()
    set(CMAKE_EXPORT_COMPILE_COMMANDS OFF)
    set(CMAKE_INTERPROCEDURAL_OPTIMIZATION OFF)
    set(CMAKE_MESSAGE_LOG_LEVEL WARNING)
    # It asks git for its commit, and complains on the screen because a fetched tree has none.
    set(GIT_EXE /bin/false CACHE INTERNAL "")
    set(GIT_EXECUTABLE /bin/false CACHE INTERNAL "")
    add_subdirectory(${tree} ${CMAKE_BINARY_DIR}/llama EXCLUDE_FROM_ALL SYSTEM)
    unset(GIT_EXE CACHE)
    unset(GIT_EXECUTABLE CACHE)
endfunction()

# The template engine: six files of common/, copied into the build tree with the limits of jinja_support.h patched in (a template comes
# with the model, and its loops, recursion and growth must end). A patch that no longer fits stops the configuration.
function(rg_add_jinja tree)
    set(out ${CMAKE_BINARY_DIR}/jinja)
    execute_process(COMMAND python3 ${CMAKE_SOURCE_DIR}/src/text/jinja_patch.py ${tree}/common ${out} RESULT_VARIABLE failed)
    if(failed)
        message(FATAL_ERROR "src/text/jinja_patch.py does not fit the llama.cpp tree ${tree}")
    endif()
    set_property(DIRECTORY ${CMAKE_SOURCE_DIR} APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/src/text/jinja_patch.py)
    set(sources)
    foreach(file jinja/lexer.cpp jinja/parser.cpp jinja/runtime.cpp jinja/value.cpp jinja/string.cpp unicode.cpp)
        list(APPEND sources ${out}/${file})
    endforeach()
    foreach(language C CXX)
        foreach(type DEBUG RELEASE RELWITHDEBINFO MINSIZEREL)
            set(CMAKE_${language}_FLAGS_${type} "-O2 -DNDEBUG")
        endforeach()
    endforeach()
    add_library(rg_jinja STATIC EXCLUDE_FROM_ALL ${sources} ${CMAKE_SOURCE_DIR}/src/text/jinja_support.cc)
    target_include_directories(rg_jinja SYSTEM PUBLIC ${out})
    target_include_directories(rg_jinja PUBLIC ${CMAKE_SOURCE_DIR}/src)
    target_compile_options(rg_jinja PRIVATE -w)
endfunction()

rg_find_llama_source()
rg_add_jinja(${RG_LLAMA_TREE})
if(RANKGATE_WITH_LLAMA)
    rg_add_llama(${RG_LLAMA_TREE})
endif()

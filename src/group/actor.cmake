rg_library(group_actor SOURCES group_actor.cc auto_actor.cc DEPS rg_group rg_transport rg_load_page)
rg_test(group_actor_test SOURCES actor_test.cc tokenspeed_cases_test.cc DEPS rg_group_actor rg_fake_rank)
if(RANKGATE_TESTS)
    target_compile_definitions(group_actor_test PRIVATE RG_FAKE_RANK="$<TARGET_FILE:rg_fake_rank_program>")
    add_dependencies(group_actor_test rg_fake_rank_program)
endif()
# The same suite with an undeclared runtime: the front must be invisible.
rg_test(group_actor_auto_test SOURCES actor_test.cc tokenspeed_cases_test.cc DEPS rg_group_actor rg_fake_rank)
if(RANKGATE_TESTS)
    target_compile_definitions(group_actor_auto_test PRIVATE RG_RUNTIME_AUTO
        RG_FAKE_RANK="$<TARGET_FILE:rg_fake_rank_program>")
    add_dependencies(group_actor_auto_test rg_fake_rank_program)
endif()
rg_bench(group_bench SOURCES group_bench.cc DEPS rg_group_actor rg_fake_rank)

// The environment of each launcher, right and wrong.
#include "world/environment.h"

#include <map>

#include "plumb/error.h"

namespace plumb {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;
using Variables = std::map<std::string, std::string>;

Place place_of(const Variables& variables) {
  return read_place([&](const std::string& name) -> std::optional<std::string> {
    const auto found = variables.find(name);
    return found == variables.end() ? std::nullopt : std::optional(found->second);
  });
}

std::string error_of(const Variables& variables) {
  try {
    place_of(variables);
  } catch (const Error& e) {
    return e.what();
  }
  return "no error";
}

TEST(Environment, WithoutALauncherThereIsOneRank) {
  const Place place = place_of({});
  EXPECT_EQ(place.launcher, "none");
  EXPECT_EQ(place.size, 1);
  EXPECT_EQ(place_of({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "4"}, {"ENVIRONMENT", "BATCH"}}).size, 1);
}

TEST(Environment, AJobIsOneLine) {
  EXPECT_EQ(place_of({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"PLUMB_JOB", "my\njob"}}).job, "job my job");
}

TEST(Environment, SaysHowManyRanksShareTheMachine) {
  const auto here = [](const Variables& variables) {
    return ranks_here([&](const std::string& name) -> std::optional<std::string> {
      const auto found = variables.find(name);
      return found == variables.end() ? std::nullopt : std::optional(found->second);
    });
  };
  EXPECT_EQ(here({}), 1);
  EXPECT_EQ(here({{"LOCAL_WORLD_SIZE", "4"}}), 1);  // left by somebody: there is no launcher
  EXPECT_EQ(here({{"RANK", "0"}, {"WORLD_SIZE", "8"}, {"LOCAL_WORLD_SIZE", "4"}}), 4);
  EXPECT_EQ(here({{"OMPI_COMM_WORLD_RANK", "0"}, {"OMPI_COMM_WORLD_SIZE", "8"}, {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}}),
            2);
  EXPECT_EQ(here({{"PMI_RANK", "0"}, {"PMI_SIZE", "8"}, {"MPI_LOCALNRANKS", "8"}}), 8);
  EXPECT_EQ(here({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "8"}, {"SLURM_STEP_TASKS_PER_NODE", "4(x2)"}}), 4);
  EXPECT_EQ(here({{"RANK", "0"}, {"WORLD_SIZE", "8"}, {"LOCAL_WORLD_SIZE", "many"}}), 1);
}

TEST(Environment, ReadsEveryLauncher) {
  struct Row {
    Variables variables;
    const char* launcher;
    int rank, size, local_rank;
    const char* host;
    int port;
  };
  const std::vector<Row> rows{
      {{{"RANK", "3"}, {"WORLD_SIZE", "8"}, {"LOCAL_RANK", "1"}, {"MASTER_ADDR", "n0"}, {"MASTER_PORT", "1234"}},
       "torchrun",
       3,
       8,
       1,
       "n0",
       1234},
      {{{"RANK", "1"}, {"WORLD_SIZE", "2"}}, "torchrun", 1, 2, 1, "127.0.0.1", 29500},
      {{{"OMPI_COMM_WORLD_RANK", "2"}, {"OMPI_COMM_WORLD_SIZE", "4"}, {"OMPI_COMM_WORLD_LOCAL_RANK", "0"}},
       "Open MPI",
       2,
       4,
       0,
       "127.0.0.1",
       29500},
      {{{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}, {"MPI_LOCALRANKID", "1"}, {"MASTER_PORT", "5"}},
       "MPICH",
       1,
       2,
       1,
       "127.0.0.1",
       5},
      {{{"SLURM_PROCID", "5"}, {"SLURM_NTASKS", "6"}, {"SLURM_LOCALID", "2"}, {"SLURM_NODELIST", "gpu[07-09]"}},
       "Slurm",
       5,
       6,
       2,
       "gpu07",
       29500},
      {{{"SLURM_PROCID", "1"},
        {"SLURM_NTASKS", "2"},
        {"SLURM_LOCALID", "1"},
        {"SLURM_NNODES", "1"},
        {"SLURM_NODELIST", "gpu07"}},
       "Slurm",
       1,
       2,
       1,
       "127.0.0.1",
       29500},
      {{{"SLURM_PROCID", "1"}, {"SLURM_NTASKS", "2"}, {"SLURM_LOCALID", "0"}, {"MASTER_ADDR", "head"}},
       "Slurm",
       1,
       2,
       0,
       "head",
       29500},
      {{{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"SLURM_PROCID", "7"}, {"SLURM_NTASKS", "9"}},
       "torchrun",
       0,
       2,
       0,
       "127.0.0.1",
       29500},
  };
  for (const Row& row : rows) {
    const Place place = place_of(row.variables);
    EXPECT_EQ(place.launcher, row.launcher);
    EXPECT_EQ(place.rank, row.rank);
    EXPECT_EQ(place.size, row.size);
    EXPECT_EQ(place.local_rank, row.local_rank);
    EXPECT_EQ(place.host, row.host);
    EXPECT_EQ(place.port, row.port);
  }
}

// A step of some nodes of a job: what is nearest to the ranks counts, whatever else is said.
TEST(Environment, OfSeveralNodeListsTakesTheStepsFirst) {
  const std::pair<const char*, const char*> lists[] = {
      {"SLURM_STEP_NODELIST", "n[2-3]"}, {"SLURM_NODELIST", "n[4-9]"}, {"SLURM_JOB_NODELIST", "n1,n5"}};
  const std::pair<const char*, const char*> counts[] = {
      {"SLURM_STEP_NUM_NODES", "2"}, {"SLURM_NNODES", "1"}, {"SLURM_JOB_NUM_NODES", "1"}};
  for (unsigned set = 0; set < 8; ++set) {
    for (unsigned counted = 0; counted < 8; ++counted) {
      Variables variables{{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "2"}};
      std::string expected = "127.0.0.1";
      for (int i = 2; i >= 0; --i) {
        if ((set >> i & 1U) == 0) continue;
        variables.insert(lists[i]);
        expected = i == 0 ? "n2" : i == 1 ? "n4" : "n1";
      }
      for (const unsigned i : {0U, 1U, 2U}) {
        if ((counted >> i & 1U) != 0) variables.insert(counts[i]);
      }
      if ((counted & 1U) == 0 && counted != 0) expected = "127.0.0.1";  // one node
      EXPECT_EQ(place_of(variables).host, expected) << "lists " << set << ", counts " << counted;
    }
  }
}

// Where no launcher says it: on one machine ranks are counted by it; machines that are told apart by name have one rank each.
TEST(Environment, WithoutALocalRankItFollowsFromWhereRankZeroIs) {
  const std::pair<const char*, const char*> launchers[] = {{"RANK", "WORLD_SIZE"},
                                                           {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"},
                                                           {"PMI_RANK", "PMI_SIZE"},
                                                           {"SLURM_PROCID", "SLURM_NTASKS"}};
  for (const auto& [rank, size] : launchers) {
    for (const char* host : {"localhost", "127.0.0.1", "127.0.1.1", "::1"}) {
      EXPECT_EQ(place_of({{rank, "3"}, {size, "4"}, {"MASTER_ADDR", host}}).local_rank, 3) << rank << " at " << host;
    }
    EXPECT_EQ(place_of({{rank, "3"}, {size, "4"}}).local_rank, 3) << rank;
    for (const char* host : {"n0", "10.0.0.7", "128.0.0.1", "fe80::1", "localhost.example"}) {
      EXPECT_EQ(place_of({{rank, "3"}, {size, "4"}, {"MASTER_ADDR", host}}).local_rank, 0) << rank << " at " << host;
    }
  }
}

TEST(Environment, KnowsThatTorchrunServesTheStoreAndWhichAttemptItIs) {
  const Place place = place_of({{"RANK", "0"},
                                {"WORLD_SIZE", "2"},
                                {"TORCHELASTIC_USE_AGENT_STORE", "True"},
                                {"TORCHELASTIC_RESTART_COUNT", "2"}});
  EXPECT_TRUE(place.store_is_hosted);
  EXPECT_EQ(place.attempt, "2");
  EXPECT_FALSE(place_of({{"RANK", "0"}, {"WORLD_SIZE", "2"}}).store_is_hosted);
}

// A job's name is the same on all its ranks, and another for any other job; none is better than a wrong one.
TEST(Environment, KnowsTheJobWhereTheLauncherNamesIt) {
  const Variables torchrun{{"RANK", "0"}, {"WORLD_SIZE", "2"}};
  const Variables open_mpi{{"OMPI_COMM_WORLD_RANK", "0"}, {"OMPI_COMM_WORLD_SIZE", "2"}};
  const Variables mpich{{"PMI_RANK", "0"}, {"PMI_SIZE", "2"}};
  const Variables slurm{{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "2"}};
  const auto job = [](Variables launcher, const Variables& more) {
    launcher.insert(more.begin(), more.end());
    return place_of(launcher).job;
  };
  const Variables everything{
      {"TORCHELASTIC_RUN_ID", "t"}, {"PMIX_NAMESPACE", "p"}, {"SLURM_JOB_ID", "7"}, {"SLURM_STEP_ID", "3"}};
  for (const Variables& launcher : {torchrun, open_mpi, mpich, slurm}) {
    EXPECT_EQ(job(launcher, {}), "");
    EXPECT_EQ(job(launcher, {{"PLUMB_JOB", "mine"}}), "job mine");
    EXPECT_EQ(job(launcher, {{"PLUMB_JOB", ""}}), "");
  }
  // Only the launcher that gave the rank is asked: torchrun's ranks may be spread over steps of Slurm.
  EXPECT_EQ(job(torchrun, everything), "torchrun's run t");
  EXPECT_EQ(job(open_mpi, everything), "Open MPI's job p");
  EXPECT_EQ(job(mpich, everything), "MPICH's job p");
  EXPECT_EQ(job(slurm, everything), "Slurm's job 7.3");
  EXPECT_EQ(job(open_mpi, {{"OMPI_MCA_ess_base_jobid", "12"}}), "Open MPI's job 12");
  EXPECT_EQ(job(slurm, {{"SLURM_JOBID", "8"}}), "Slurm's job 8");
  EXPECT_EQ(job(slurm, {{"SLURM_JOBID", "8"}, {"SLURM_STEPID", "0"}}), "Slurm's job 8.0");
  EXPECT_EQ(job(slurm, {{"SLURM_HET_JOB_ID", "9"}, {"SLURM_JOB_ID", "10"}, {"SLURM_STEP_ID", "0"}}), "Slurm's job 9");
  EXPECT_EQ(place_of(open_mpi).size_variable, "OMPI_COMM_WORLD_SIZE");
  EXPECT_EQ(place_of(torchrun).size_variable, "WORLD_SIZE");
}

TEST(Environment, SaysWhichVariableHasWhichWrongValue) {
  EXPECT_THAT(error_of({{"RANK", "abc"}, {"WORLD_SIZE", "2"}}), HasSubstr("RANK=abc"));
  EXPECT_THAT(error_of({{"RANK", "-1"}, {"WORLD_SIZE", "2"}}), HasSubstr("RANK=-1"));
  EXPECT_THAT(error_of({{"RANK", "1x"}, {"WORLD_SIZE", "2"}}), HasSubstr("RANK=1x"));
  EXPECT_THAT(error_of({{"RANK", ""}, {"WORLD_SIZE", "2"}}), HasSubstr("RANK="));
  EXPECT_THAT(error_of({{"RANK", "0"}, {"WORLD_SIZE", "0"}}), HasSubstr("WORLD_SIZE=0"));
  EXPECT_THAT(error_of({{"RANK", "2"}, {"WORLD_SIZE", "2"}}), AllOf(HasSubstr("RANK=2"), HasSubstr("WORLD_SIZE=2")));
  EXPECT_THAT(error_of({{"RANK", "1"}}), AllOf(HasSubstr("RANK=1"), HasSubstr("WORLD_SIZE is not")));
  EXPECT_THAT(error_of({{"WORLD_SIZE", "4"}}), AllOf(HasSubstr("WORLD_SIZE=4"), HasSubstr("RANK is not")));
  EXPECT_THAT(error_of({{"PMI_RANK", "1"}}), HasSubstr("PMI_SIZE is not"));
  for (const char* port : {"0", "65536", "-3", "http", "29500 "}) {
    EXPECT_THAT(error_of({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_PORT", port}}),
                HasSubstr(std::string("MASTER_PORT=") + port));
  }
  EXPECT_THAT(error_of({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", ""}}), HasSubstr("MASTER_ADDR"));
  EXPECT_THAT(error_of({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"LOCAL_RANK", "x"}}), HasSubstr("LOCAL_RANK=x"));
}

TEST(Environment, AProcessThatBringsItsStoreReadsItsPlaceOnTheMachine) {
  const auto place_with = [](const std::optional<std::string>& local) {
    return place_at(3, 4, [&](const std::string& name) { return name == "LOCAL_RANK" ? local : std::nullopt; });
  };
  EXPECT_EQ(place_with("1").local_rank, 1);
  EXPECT_EQ(place_with("").local_rank, 3);
  EXPECT_EQ(place_with(std::nullopt).local_rank, 3);
  for (const char* wrong : {"x", "1x", "-1"}) {
    EXPECT_THAT(([&] { place_with(wrong); }), ThrowsMessage<Error>(HasSubstr(std::string("LOCAL_RANK=") + wrong)));
  }
}

TEST(Environment, ReadsTheFirstNodeOfASimpleList) {
  EXPECT_EQ(first_node("a"), "a");
  EXPECT_EQ(first_node("a,b"), "a");
  EXPECT_EQ(first_node("n[3,5]"), "n3");
  EXPECT_EQ(first_node("n[003-005],m"), "n003");
  EXPECT_EQ(first_node("a1,n[3-5]"), "a1");
  EXPECT_EQ(first_node("n[1-2]-ib"), "n1-ib");
  EXPECT_EQ(first_node("r[1-2]n[1-4]"), std::nullopt);
  EXPECT_EQ(first_node("n["), std::nullopt);
  EXPECT_EQ(first_node(""), std::nullopt);
}

}  // namespace
}  // namespace plumb

// A watch whose channel says what a test wants to be heard, and waits for work that does not end.
#pragma once

#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "plumb/error.h"
#include "watch/watch.h"

namespace plumb::test {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr int kMe = 1;
inline const Where kBackward{Where::Kind::backward, 5, 2, "reduction of bucket 3"};

struct Endless : c10d::Work {
  bool isCompleted() override { return false; }
  bool wait(milliseconds limit) override {
    std::this_thread::sleep_for(limit);
    throw std::runtime_error("a slice is over");
  }
};

// What everybody says; `ask` may change it between two looks.
struct Said {
  std::vector<ReportChannel::Heard> heard;
  std::function<void(Said& said)> ask = [](Said&) {};
  bool answers = true, beats = false;
  std::string trouble, objection;
  std::vector<Report> published;
  int looks = 0, left = 0;
};

struct FakeChannel : ReportChannel {
  explicit FakeChannel(Said& said) : said(said) {}
  void publish(const Report& report) override { said.published.push_back(report); }
  std::optional<std::vector<Heard>> read(milliseconds) override {
    ++said.looks;
    said.ask(said);
    return said.answers ? std::optional(said.heard) : std::nullopt;
  }
  std::string trouble() override { return said.trouble; }
  bool beats() const override { return said.beats; }
  const std::string* objection() const override { return said.objection.empty() ? nullptr : &said.objection; }
  int64_t messages() const override { return 5; }
  void leave() override { ++said.left; }
  Said& said;
};

struct Scene : Said {
  explicit Scene(int ranks = 4, milliseconds timeout = milliseconds(40))
      : watch(kMe, ranks, timeout, milliseconds(1), progress, std::make_unique<FakeChannel>(*this)) {
    heard.resize(ranks);
    for (ReportChannel::Heard& one : heard) one.changed = Clock::now();
    progress->issued[data_index] = 7;
  }
  Report& of(int rank) { return heard[rank].report; }
  // It has issued as many collectives of the data group as this rank waits for, or not.
  void came(int rank) { of(rank).issued[data_index] = 7; }
  std::string waiting(Ticket ticket = {.group = data_index, .number = 7}, const Where& where = kBackward) {
    Endless work;
    try {
      watch.wait(work, where, ticket);
    } catch (const Error& error) {
      EXPECT_TRUE(watch.failed());
      // What the others will read of it.
      EXPECT_EQ(published.back().state, Report::State::failed);
      EXPECT_EQ(published.back().message, error.what()) << "the others are told the same";
      EXPECT_EQ(published.back().message, error.what());
      EXPECT_EQ(describe(published.back().where), describe(objection.empty() ? where : Where{}));
      EXPECT_GE(published.back().origin, 0);
      EXPECT_THROW(watch.check(), Error);
      return error.what();
    }
    return "";
  }

  std::shared_ptr<Progress> progress = std::make_shared<Progress>(kMe);
  Watch watch;
};

// Rank 3 waits for a collective that nobody else has issued, and has not issued the one that this rank waits for.
inline void cross(Scene& scene, const Where& where = {Where::Kind::step, 5, 1, ""}) {
  Report& other = scene.of(3);
  other.state = Report::State::waiting;
  other.ticket = {.group = control_index, .number = 4};
  other.where = where;
  other.wait = 11;
}

}  // namespace plumb::test

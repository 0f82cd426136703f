// Backwards that are captured into a graph, which replays them where the host does not look: memory stays where the graph writes it,
// and what would move it, or miss a replay, is refused. The simulated device cannot capture; the test says when it does.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "engine/impl.h"
#include "lane/lane.h"
#include "plumb/plumb.h"
#include "plumb/sim.h"

namespace plumb {
namespace {

using testing::HasSubstr;
using testing::ThrowsMessage;

struct Accelerator final : testing::Environment {
  void SetUp() override { sim::init(4); }
};
const auto* const accelerator = testing::AddGlobalTestEnvironment(new Accelerator);

class CapturedBackwards : public testing::Test {
 protected:
  CapturedBackwards() {
    engine = std::make_unique<Engine>(World(), NamedTensors{{"a", a}, {"b", b}}, NamedTensors{}, SGD{.lr = 1},
                                      Options{.bucket_bytes = 16, .first_bucket_bytes = 16});
  }
  ~CapturedBackwards() override { ask_about_graphs(nullptr); }

  // What `work` enqueues is captured.
  static void captured(const std::function<void()>& work) {
    ask_about_graphs([](const c10::Stream&) { return uint64_t{7}; });
    work();
    ask_about_graphs(nullptr);
  }
  std::vector<const void*> places() const {
    std::vector<const void*> all;
    for (const Bucket& bucket : engine->impl().reducer->buckets()) all.push_back(bucket.gradient.const_data_ptr());
    return all;
  }
  void a_step() {
    (a.sum() + b.sum()).backward();
    engine->step();
  }

  sim::Session session{1};
  at::Tensor a = at::zeros({8}, sim::device(0)).requires_grad_(), b = at::zeros({8}, sim::device(0)).requires_grad_();
  std::unique_ptr<Engine> engine;
};

TEST_F(CapturedBackwards, BeforeTheFirstStepAreRefused) {
  ask_about_graphs([](const c10::Stream&) { return uint64_t{7}; });
  EXPECT_THAT([&] { engine->backward(a.sum()); }, ThrowsMessage<Error>(HasSubstr("before the first step")));
  EXPECT_THAT([&] { engine->deliver(a, at::ones({8}, a.device())); },
              ThrowsMessage<Error>(HasSubstr("before the first step")));
}

// Also one that comes before any other backward, whose buckets would be laid out anew after it.
TEST_F(CapturedBackwards, WriteWhereGradientsStay) {
  for (at::Tensor& p : {std::ref(a), std::ref(b)}) p.mutable_grad() = at::ones({8}, a.device());
  engine->step();
  const auto before = places();
  EXPECT_FALSE(engine->impl().reducer->rebuilt());
  captured([&] { (b.sum() + a.sum()).backward(); });
  EXPECT_EQ(places(), before);
  EXPECT_TRUE(engine->impl().reducer->rebuilt()) << "and no later one moves them";
  a_step();
  EXPECT_EQ(places(), before);
  for (const Bucket& bucket : engine->impl().reducer->buckets()) EXPECT_TRUE(bucket.captured);
}

TEST_F(CapturedBackwards, OfSomeBucketsLeaveTheOthersFree) {
  a_step();
  engine->zero_grad();
  captured([&] { a.sum().backward(); });
  for (const Bucket& bucket : engine->impl().reducer->buckets()) {
    EXPECT_EQ(bucket.captured, bucket.sinks[0]->name == "a");
  }
}

TEST_F(CapturedBackwards, RefuseAGradientThatIsKeptAfterItWasCleared) {
  a_step();
  captured([&] { (a.sum() + b.sum()).backward(); });
  const at::Tensor kept = b.grad();
  b.mutable_grad().reset();
  EXPECT_THAT([&] { engine->backward(a.sum()); },
              ThrowsMessage<Error>(testing::AllOf(HasSubstr("'b' must move"), HasSubstr("a graph was captured"))));
}

TEST_F(CapturedBackwards, RefuseAnotherDtype) {
  a_step();
  captured([&] { (a.sum() + b.sum()).backward(); });
  a.mutable_grad().reset();
  a.set_grad_dtype(at::kDouble);
  EXPECT_THAT([&] { engine->backward(b.sum()); }, ThrowsMessage<Error>(HasSubstr("'a' must move")));
}

// A replay would have filled memory that no .grad shows any more.
TEST_F(CapturedBackwards, RefuseAStepAfterTheirGradientsWereCleared) {
  a_step();
  engine->zero_grad();
  engine->step();  // nothing was captured yet: a step of nothing
  captured([&] { (a.sum() + b.sum()).backward(); });
  engine->step();
  engine->step();  // as after a replay: they are still there
  b.mutable_grad().reset();
  engine->step();  // one of them is
  engine->zero_grad();
  EXPECT_THAT([&] { engine->step(); }, ThrowsMessage<Error>(HasSubstr("have been cleared since")));
  a.sum().backward();  // one that the host sees
  engine->step();
}

}  // namespace
}  // namespace plumb

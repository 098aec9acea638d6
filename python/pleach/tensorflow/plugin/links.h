// Which tasks this process has links to.
//
// The first receive from a task asks it for an introduction and makes the link; other receives wait
// for the end of that, and know then whether to ask for an offer. A task that was asked and offers
// nothing may be another one now: its link is doubted, and after a pause a receive asks it for its
// introduction again. Invariant: each receive goes on exactly once, and a cancelled one soon.
#ifndef PLEACH_TENSORFLOW_LINKS_H_
#define PLEACH_TENSORFLOW_LINKS_H_

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "exchange.h"
#include "messages.h"
#include "tensorflow/core/common_runtime/device.h"
#include "tensorflow/core/distributed_runtime/call_options.h"
#include "tensorflow/core/distributed_runtime/tensor_coding.h"
#include "tensorflow/core/distributed_runtime/worker_interface.h"
#include "tensorflow/core/platform/env.h"
#include "tensorflow/core/protobuf/worker.pb.h"

namespace pleach {

// How long a task has to introduce itself, in milliseconds.
constexpr int64_t kIntroductionWaitMs = 10'000;
// How long making a link may take, in milliseconds.
constexpr uint64_t kLinkWaitMs = 3'000;
// Between two attempts at a link to the same task: doubled after each that was in vain.
constexpr std::chrono::seconds kLinkPause{20};
constexpr int kLinkPauseDoublings = 4;
// The same where the task has shown that it may be another one now.
constexpr std::chrono::seconds kLinkPauseAfterLoss{2};
// Most received tensors of a task that are kept where it has lent them: it lends 4096 at a time.
constexpr size_t kKeptMax = 3'000;

// A link to a task: its peer, and the incarnation that it had when the link was made.
class Link {
 public:
  Link(pleachPeer_t peer, uint64_t incarnation) : peer_(peer), incarnation_(incarnation) {}
  Link(const Link&) = delete;
  ~Link() { pleachPeerClose(peer_); }
  pleachPeer_t peer() const { return peer_; }
  uint64_t incarnation() const { return incarnation_; }
  // The number of received tensors that are kept where they were lent.
  const std::shared_ptr<std::atomic<size_t>>& kept() const { return kept_; }

 private:
  const pleachPeer_t peer_;
  const uint64_t incarnation_;
  const std::shared_ptr<std::atomic<size_t>> kept_ = std::make_shared<std::atomic<size_t>>(0);
};

// A fetch for nobody: the sender keeps what it has offered until it is received.
inline std::shared_ptr<Fetch> Dropping(std::shared_ptr<Link> link) {
  return std::make_shared<Fetch>([link = std::move(link)](const absl::Status&, Lent) {});
}

class Links {
 public:
  using Clock = std::chrono::steady_clock;
  // With the link, or null where tensors go by gRPC; an error where regions are required.
  using Found = std::function<void(const absl::Status&, std::shared_ptr<Link>)>;

  // A receive that needs to know the link. `worker`, of the task, and `device`, any of this
  // process, stay until `found` is called. `is_cancelled` is called under the lock of the links.
  struct Seeker {
    const void* receive;
    tensorflow::WorkerInterface* worker;
    tensorflow::Device* device;
    std::function<bool()> is_cancelled;
    Found found;
  };

  static Links* Get() {
    static auto* links = new Links;
    return links;
  }

  // Finds the link to a task, after an attempt to make it where that is due.
  void Find(const std::string& task, Seeker seeker) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (seeker.is_cancelled()) {
      lock.unlock();
      return seeker.found(Cancelled(), nullptr);
    }
    State& state = states_[task];
    const bool is_due =
        (state.link == nullptr || state.is_doubted) && Clock::now() >= state.next_attempt;
    if (state.is_connecting || is_due) {
      const bool is_first = !std::exchange(state.is_connecting, true);
      state.waiting.push_back(seeker);
      if (!is_first) return;
      const auto call = state.introduction = std::make_shared<IntroductionCall>(seeker.receive);
      lock.unlock();
      return Introduce(task, seeker.worker, seeker.device, call);
    }
    std::shared_ptr<Link> link = state.link;
    absl::Status why = state.why;
    lock.unlock();
    if (link != nullptr && link->kept()->load(std::memory_order_relaxed) >= kKeptMax) {
      link = nullptr;
      why = absl::ResourceExhaustedError(absl::StrCat(kKeptMax, " of its tensors are kept here"));
    }
    seeker.found(Required(task, link, why), link);
  }

  // Has a receive that was cancelled go on, if it waits here: by another thread, and once its own
  // request for an introduction has ended.
  void Leave(const std::string& task, const void* receive) {
    std::unique_lock<std::mutex> lock(mutex_);
    State& state = states_[task];
    if (const auto call = state.introduction; call != nullptr && call->receive == receive) {
      call->is_cancelled = true;
      lock.unlock();
      return call->options.StartCancel();
    }
    const auto left = std::find_if(state.waiting.begin(), state.waiting.end(),
                                   [receive](const Seeker& one) { return one.receive == receive; });
    if (left == state.waiting.end()) return;
    tensorflow::Env::Default()->SchedClosure(
        [found = std::move(left->found)] { found(Cancelled(), nullptr); });
    state.waiting.erase(left);
  }

  // This link is of no use any more: the task has ended, or another one has taken its place.
  void Lost(const std::string& task, const std::shared_ptr<Link>& link) {
    std::lock_guard<std::mutex> lock(mutex_);
    State& state = states_[task];
    if (state.link != link || link == nullptr) return;
    state.link = nullptr;
    state.vain_attempts = 0;
    state.next_attempt = Clock::now() + kLinkPauseAfterLoss;
    state.why = absl::UnavailableError("its link is lost");
  }

  // A task that was asked over this link, null if it was not asked, has sent a large tensor by
  // gRPC: it could not lend it, or is another one than it was. An error where regions are required.
  absl::Status NotOffered(const std::string& task, const std::shared_ptr<Link>& link) {
    if (link == nullptr) return absl::OkStatus();
    {
      std::lock_guard<std::mutex> lock(mutex_);
      State& state = states_[task];
      if (state.link == link && !std::exchange(state.is_doubted, true))
        state.next_attempt = std::max(state.next_attempt, Clock::now() + kLinkPauseAfterLoss);
    }
    return Required(task, nullptr, absl::InternalError("it could not lend this tensor"));
  }

 private:
  struct IntroductionCall {
    explicit IntroductionCall(const void* receive) : receive(receive) {
      options.SetTimeout(kIntroductionWaitMs);
    }
    // The receive whose worker is used.
    const void* const receive;
    // Under the lock of the links.
    bool is_cancelled = false;
    tensorflow::CallOptions options;
    tensorflow::RecvTensorRequest request;
    tensorflow::TensorResponse response;
  };

  struct State {
    bool is_connecting = false;
    // While the task is asked, as the first part of connecting.
    std::shared_ptr<IntroductionCall> introduction;
    std::shared_ptr<Link> link;
    bool is_doubted = false;
    Clock::time_point next_attempt;
    int vain_attempts = 0;
    // Why there is no link.
    absl::Status why;
    std::vector<Seeker> waiting;
  };

  static absl::Status Cancelled() { return absl::CancelledError("the receive was cancelled"); }

  static absl::Status Required(const std::string& task, const std::shared_ptr<Link>& link,
                               const absl::Status& why) {
    if (link != nullptr || !Exchange::Get()->requires_regions()) return absl::OkStatus();
    // A task that is not there now may be there soon.
    const bool is_passing =
        absl::IsUnavailable(why) || absl::IsCancelled(why) || absl::IsAborted(why);
    return absl::Status(
        is_passing ? why.code() : absl::StatusCode::kFailedPrecondition,
        absl::StrCat("regions are required (PLEACH_REQUIRE=regions), and there are none with task ",
                     task, ": ", why.message()));
  }

  void Introduce(const std::string& task, tensorflow::WorkerInterface* worker,
                 tensorflow::Device* device, const std::shared_ptr<IntroductionCall>& call) {
    tensorflow::AllocatorAttributes on_host;
    on_host.set_on_host(true);
    call->response.InitAlloc(device, on_host);
    call->request.set_rendezvous_key(kIntroductionKey);
    Write(Ask{}, call->request.mutable_transport_options());
    worker->RecvTensorAsync(&call->options, &call->request, &call->response,
                            [this, task, call](const absl::Status& status) {
                              Introduced(task, status, *call);
                            });
    // A cancellation that came before the request could be cancelled has not reached it.
    std::unique_lock<std::mutex> lock(mutex_);
    const bool is_cancelled = call->is_cancelled;
    lock.unlock();
    if (is_cancelled) call->options.StartCancel();
  }

  void Introduced(const std::string& task, const absl::Status& status, const IntroductionCall& call) {
    std::unique_lock<std::mutex> lock(mutex_);
    State& state = states_[task];
    state.introduction = nullptr;
    const std::shared_ptr<Link> link = state.link;
    if (!status.ok() && call.is_cancelled) {
      // The others go on with the worker of another receive.
      state.is_connecting = false;
      const std::vector<Seeker> waiting = std::move(state.waiting);
      state.waiting.clear();
      lock.unlock();
      for (const Seeker& seeker : waiting) Find(task, seeker);
      return;
    }
    lock.unlock();
    Introduction introduction;
    if (!status.ok()) {
      // A task that is not there yet says nothing about its plug-in.
      const bool is_there = !absl::IsUnavailable(status) && !absl::IsCancelled(status);
      End(task, nullptr, is_there,
          absl::Status(status.code(), absl::StrCat("it does not introduce itself: ", status.message())));
    } else if (!Read(call.response.metadata().transport_options(), &introduction)) {
      End(task, nullptr, true, absl::InternalError("it has another version of pleach"));
    } else if (introduction.incarnation == Exchange::Get()->incarnation()) {
      End(task, nullptr, true, absl::InternalError("it is of the same process"));
    } else if (link != nullptr && introduction.incarnation == link->incarnation()) {
      End(task, link, true, absl::OkStatus());
    } else {
      // Connecting blocks, and this thread serves other calls.
      tensorflow::Env::Default()->SchedClosure(
          [this, task, introduction] { Connect(task, introduction); });
    }
  }

  void Connect(const std::string& task, const Introduction& introduction) {
    pleachPeer_t peer = nullptr;
    pleachResult_t result =
        pleachEndpointConnect(Exchange::Get()->endpoint(), introduction.address.c_str(), &peer);
    if (result != pleachSuccess) return End(task, nullptr, true, LastFailure(result));
    auto link = std::make_shared<Link>(peer, introduction.incarnation);
    result = pleachPeerShareRegions(peer, kLinkWaitMs);
    uint64_t incarnation = 0;
    if (result != pleachSuccess) return End(task, nullptr, true, LastFailure(result));
    if (pleachPeerIncarnation(peer, &incarnation) != pleachSuccess ||
        incarnation != introduction.incarnation)
      return End(task, nullptr, true,
                 absl::InternalError(absl::StrCat(
                     "another program listens at ", introduction.address,
                     "; set PLEACH_INTERFACE and PLEACH_SECRET_FILE on all hosts")));
    End(task, std::move(link), false, absl::OkStatus());
  }

  // The end of an attempt; one in vain has found nothing new.
  void End(const std::string& task, std::shared_ptr<Link> link, bool is_in_vain,
           const absl::Status& why) {
    std::vector<Seeker> waiting;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      State& state = states_[task];
      state.is_connecting = false;
      state.link = link;
      state.is_doubted = false;
      state.next_attempt = Clock::now();
      if (is_in_vain) state.next_attempt += kLinkPause * (1 << state.vain_attempts);
      state.vain_attempts = is_in_vain ? std::min(state.vain_attempts + 1, kLinkPauseDoublings) : 0;
      state.why = why;
      waiting.swap(state.waiting);
    }
    const absl::Status status = Required(task, link, why);
    for (const Seeker& seeker : waiting) seeker.found(status, link);
  }

  std::mutex mutex_;
  std::map<std::string, State> states_;
};

}  // namespace pleach

#endif  // PLEACH_TENSORFLOW_LINKS_H_

// Which tasks this process has links to.
//
// The first receive from a task asks it for an introduction and makes the link; other receives wait
// for the end of that, and know then whether to ask for an offer. Invariant: each waiting receive
// goes on exactly once.
#ifndef PLEACH_TENSORFLOW_LINKS_H_
#define PLEACH_TENSORFLOW_LINKS_H_

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

// How long making a link may take, in milliseconds.
constexpr uint64_t kLinkWaitMs = 3'000;
// Between two attempts at a link to the same task.
constexpr std::chrono::seconds kLinkPause{20};
// The same where the task has shown that it is another one now.
constexpr std::chrono::seconds kLinkPauseAfterLoss{2};

// A link to a task: its peer, and the incarnation that it had when the link was made.
class Link {
 public:
  Link(pleachPeer_t peer, uint64_t incarnation) : peer_(peer), incarnation_(incarnation) {}
  Link(const Link&) = delete;
  ~Link() { pleachPeerClose(peer_); }
  pleachPeer_t peer() const { return peer_; }
  uint64_t incarnation() const { return incarnation_; }

 private:
  const pleachPeer_t peer_;
  const uint64_t incarnation_;
};

class Links {
 public:
  using Clock = std::chrono::steady_clock;
  // With the link, or null where tensors go by gRPC; an error where regions are required.
  using Found = std::function<void(const absl::Status&, std::shared_ptr<Link>)>;

  static Links* Get() {
    static auto* links = new Links;
    return links;
  }

  // Finds the link to a task, after an attempt to make it where that is due. `worker`, `device`, any
  // of this process, and `options` stay until `found` is called.
  void Find(const std::string& task, tensorflow::WorkerInterface* worker,
            tensorflow::Device* device, tensorflow::CallOptions* options, Found found) {
    std::unique_lock<std::mutex> lock(mutex_);
    State& state = states_[task];
    const bool is_due = state.link == nullptr && Clock::now() >= state.next_attempt;
    if (state.is_connecting || is_due) {
      const bool is_first = !std::exchange(state.is_connecting, true);
      state.waiting.push_back(std::move(found));
      lock.unlock();
      if (is_first) Introduce(task, worker, device, options);
      return;
    }
    const std::shared_ptr<Link> link = state.link;
    const absl::Status status = Required(task, link, state.reason);
    lock.unlock();
    found(status, link);
  }

  // This link is of no use any more: the task has ended, or another one has taken its place.
  void Lost(const std::string& task, const std::shared_ptr<Link>& link) {
    std::lock_guard<std::mutex> lock(mutex_);
    State& state = states_[task];
    if (state.link != link || link == nullptr) return;
    state.link = nullptr;
    state.next_attempt = Clock::now() + kLinkPauseAfterLoss;
    state.reason = "its link is lost";
  }

 private:
  struct State {
    bool is_connecting = false;
    std::shared_ptr<Link> link;
    Clock::time_point next_attempt;
    // Why there is no link.
    std::string reason;
    std::vector<Found> waiting;
  };

  struct IntroductionCall {
    tensorflow::RecvTensorRequest request;
    tensorflow::TensorResponse response;
  };

  static absl::Status Required(const std::string& task, const std::shared_ptr<Link>& link,
                               const std::string& reason) {
    if (link != nullptr || !Exchange::Get()->requires_regions()) return absl::OkStatus();
    return absl::FailedPreconditionError(
        absl::StrCat("regions are required (PLEACH_REQUIRE=regions), and there are none with task ",
                     task, ": ", reason));
  }

  void Introduce(const std::string& task, tensorflow::WorkerInterface* worker,
                 tensorflow::Device* device, tensorflow::CallOptions* options) {
    auto call = std::make_shared<IntroductionCall>();
    tensorflow::AllocatorAttributes on_host;
    on_host.set_on_host(true);
    call->response.InitAlloc(device, on_host);
    call->request.set_rendezvous_key(kIntroductionKey);
    Write(Ask{}, call->request.mutable_transport_options());
    worker->RecvTensorAsync(
        options, &call->request, &call->response, [this, task, call](const absl::Status& status) {
          Introduction introduction;
          if (!status.ok()) {
            // A task that is not there yet says nothing about its plug-in.
            const bool is_there = !absl::IsUnavailable(status) && !absl::IsCancelled(status);
            End(task, nullptr, is_there ? kLinkPause : std::chrono::seconds(0),
                absl::StrCat("it does not introduce itself: ", status.message()));
          } else if (!Read(call->response.metadata().transport_options(), &introduction)) {
            End(task, nullptr, kLinkPause, "it has another version of pleach");
          } else if (introduction.incarnation == Exchange::Get()->incarnation()) {
            End(task, nullptr, kLinkPause, "it is of the same process");
          } else {
            // Connecting blocks, and this thread serves other calls.
            tensorflow::Env::Default()->SchedClosure(
                [this, task, introduction] { Connect(task, introduction); });
          }
        });
  }

  void Connect(const std::string& task, const Introduction& introduction) {
    pleachPeer_t peer = nullptr;
    pleachResult_t result =
        pleachEndpointConnect(Exchange::Get()->endpoint(), introduction.address.c_str(), &peer);
    if (result != pleachSuccess)
      return End(task, nullptr, kLinkPause, LastFailure(result).message());
    auto link = std::make_shared<Link>(peer, introduction.incarnation);
    result = pleachPeerShareRegions(peer, kLinkWaitMs);
    uint64_t incarnation = 0;
    if (result != pleachSuccess)
      return End(task, nullptr, kLinkPause, LastFailure(result).message());
    if (pleachPeerIncarnation(peer, &incarnation) != pleachSuccess ||
        incarnation != introduction.incarnation)
      return End(task, nullptr, kLinkPause,
                 absl::StrCat("another program listens at ", introduction.address,
                              "; set PLEACH_INTERFACE and PLEACH_SECRET_FILE on all hosts"));
    End(task, std::move(link), kLinkPause, "");
  }

  void End(const std::string& task, std::shared_ptr<Link> link, std::chrono::seconds pause,
           absl::string_view reason) {
    std::vector<Found> waiting;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      State& state = states_[task];
      state.is_connecting = false;
      state.link = link;
      state.next_attempt = Clock::now() + pause;
      state.reason = std::string(reason);
      waiting.swap(state.waiting);
    }
    const absl::Status status = Required(task, link, std::string(reason));
    for (Found& found : waiting) found(status, link);
  }

  std::mutex mutex_;
  std::map<std::string, State> states_;
};

}  // namespace pleach

#endif  // PLEACH_TENSORFLOW_LINKS_H_

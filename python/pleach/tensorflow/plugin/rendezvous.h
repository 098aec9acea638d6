// The receiver's side of tensors between tasks.
#ifndef PLEACH_TENSORFLOW_RENDEZVOUS_H_
#define PLEACH_TENSORFLOW_RENDEZVOUS_H_

#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "absl/synchronization/notification.h"
#include "links.h"
#include "receive.h"
#include "tensorflow/core/common_runtime/device.h"
#include "tensorflow/core/common_runtime/device_mgr.h"
#include "tensorflow/core/distributed_runtime/base_rendezvous_mgr.h"
#include "tensorflow/core/distributed_runtime/request_id.h"
#include "tensorflow/core/distributed_runtime/worker_cache.h"
#include "tensorflow/core/distributed_runtime/worker_session.h"

namespace pleach {

// One receive: RecvTensor, and the fetch of the offer that may be its answer.
class ReceiveCall : public tensorflow::BaseRecvTensorCall {
 public:
  ReceiveCall(std::string task, std::shared_ptr<tensorflow::WorkerCacheInterface> workers,
              tensorflow::WorkerInterface* worker, int64_t step,
              const tensorflow::Rendezvous::ParsedKey& key,
              const tensorflow::Rendezvous::Args& args, tensorflow::Device* device)
      : task_(std::move(task)),
        workers_(std::move(workers)),
        worker_(worker),
        device_(device),
        may_ask_(key.src.type == "CPU" &&
                 (device->device_type() == "CPU" || args.alloc_attrs.on_host())) {
    request_.set_step_id(step);
    request_.set_rendezvous_key(key.FullKey().data(), key.FullKey().size());
    request_.set_request_id(tensorflow::GetUniqueRequestId());
    response_.InitAlloc(device, args.alloc_attrs);
  }

  ~ReceiveCall() override { workers_->ReleaseWorker(task_, worker_); }

  void Start(std::function<void()> done) override {
    done_ = std::move(done);
    if (!may_ask_) return Ask(absl::OkStatus(), nullptr);
    Links::Get()->Find(task_, {this, worker_, device_, [this] { return !status().ok(); },
                               [this](const absl::Status& status, std::shared_ptr<Link> link) {
                                 Ask(status, std::move(link));
                               }});
  }

  // Called under locks that the end of a call takes: so another thread ends it.
  void StartAbort(const absl::Status& status) override {
    std::shared_ptr<Fetch> fetch;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      status_.Update(status);
      fetch = fetch_;
    }
    Links::Get()->Leave(task_, this);
    options_.StartCancel();
    if (fetch != nullptr) fetch->Cancel();
  }

  absl::Status status() const override {
    std::lock_guard<std::mutex> lock(mutex_);
    return status_;
  }

  const tensorflow::Tensor& tensor() const { return is_lent_ ? tensor_ : response_.tensor(); }
  bool is_dead() const { return response_.metadata().is_dead(); }

 private:
  void Ask(const absl::Status& found, std::shared_ptr<Link> link) {
    link_ = std::move(link);
    const absl::Status before = status();
    if (!found.ok() || !before.ok()) return End(before.ok() ? found : before);
    if (link_ != nullptr) Write(pleach::Ask{link_->incarnation()}, request_.mutable_transport_options());
    const auto is_checked = std::make_shared<absl::Notification>();
    worker_->RecvTensorAsync(&options_, &request_, &response_,
                             [this, is_checked](const absl::Status& status) {
                               // This call may end now: nobody else uses it.
                               is_checked->WaitForNotification();
                               Answered(status);
                             });
    // An abort that came before the request could be cancelled has not reached it.
    if (!this->status().ok()) options_.StartCancel();
    is_checked->Notify();
  }

  void Answered(const absl::Status& status) {
    if (!status.ok()) {
      // The end of a task is seen here first; its successor has another link.
      if (absl::IsUnavailable(status)) Links::Get()->Lost(task_, link_);
      return End(status);
    }
    Offer offer;
    if (Read(response_.metadata().transport_options(), &offer)) {
      if (link_ == nullptr) return End(absl::DataLossError("an offer came that was not asked for"));
      return Receive(offer);
    }
    if (response_.tensor().TotalBytes() < kLentBytesMin ||
        !tensorflow::DataTypeCanUseMemcpy(response_.tensor().dtype()))
      return End(absl::OkStatus());
    ReceivedCounts::Get()->CountByGrpc();
    End(Links::Get()->NotOffered(task_, link_));
  }

  void Receive(const Offer& offer) {
    auto done = [this, offer](const absl::Status& status, Lent lent) {
      if (absl::IsUnavailable(status)) Links::Get()->Lost(task_, link_);
      is_lent_ = status.ok();
      End(is_lent_ ? TensorOf(offer, std::move(lent), link_->kept(), &tensor_) : status);
    };
    // This call may have ended when Start returns.
    const auto link = link_;
    const std::string key = request_.rendezvous_key();
    auto fetch = std::make_shared<Fetch>(std::move(done));
    bool is_aborted = false;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      fetch_ = fetch;
      is_aborted = !status_.ok();
    }
    if (is_aborted) End(absl::OkStatus()), fetch = Dropping(link);
    fetch->Start(link->peer(), offer.number, key);
  }

  // The last thing that this call does.
  void End(const absl::Status& status) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      status_.Update(Named(status, request_.rendezvous_key(), task_));
    }
    const std::function<void()> done = std::move(done_);
    done();
  }

  const std::string task_;
  // Keeps the cache while its worker is used: a session may get another one.
  const std::shared_ptr<tensorflow::WorkerCacheInterface> workers_;
  tensorflow::WorkerInterface* const worker_;
  tensorflow::Device* const device_;
  const bool may_ask_;
  tensorflow::CallOptions options_;
  tensorflow::RecvTensorRequest request_;
  tensorflow::TensorResponse response_;
  std::function<void()> done_;
  std::shared_ptr<Link> link_;
  bool is_lent_ = false;
  tensorflow::Tensor tensor_;
  mutable std::mutex mutex_;
  absl::Status status_;
  std::shared_ptr<Fetch> fetch_;
};

// Tensors of a step.
class Rendezvous : public tensorflow::BaseRemoteRendezvous {
 public:
  using BaseRemoteRendezvous::BaseRemoteRendezvous;

  // Gives back a tensor of this task whose receiver does not want it any more: the next receive of
  // its key takes it.
  void PutBack(const tensorflow::Rendezvous::ParsedKey& key,
               const tensorflow::Rendezvous::Args& args, const tensorflow::Tensor& tensor,
               bool is_dead) {
    // A step that has ended drops its tensors.
    if (is_initialized()) Send(key, args, tensor, is_dead).IgnoreError();
  }

 protected:
  void RecvFromRemoteAsync(const tensorflow::Rendezvous::ParsedKey& key,
                           const tensorflow::Rendezvous::Args& args, DoneCallback done) override {
    const auto fail = [&](absl::Status status) {
      done(status, tensorflow::Rendezvous::Args(), args, tensorflow::Tensor(), false);
    };
    std::string task, rest;
    if (!tensorflow::DeviceNameUtils::SplitDeviceName(key.src_device, &task, &rest))
      return fail(absl::InternalError(absl::StrCat("there is no task in ", key.src_device)));
    tensorflow::WorkerSession* session = this->session();
    tensorflow::Device* device = nullptr;
    absl::Status found = session->device_mgr()->LookupDevice(key.dst_device, &device);
    if (!found.ok()) return fail(found);
    auto workers = session->GetSharedWorkerCache();
    tensorflow::WorkerInterface* worker = workers->GetOrCreateWorker(task);
    if (worker == nullptr)
      return fail(absl::InternalError(absl::StrCat("there is no task ", task, " in the cluster")));
    auto* call = new ReceiveCall(task, std::move(workers), worker, step_id_, key, args, device);
    RegisterCall(call, args);
    if (const absl::Status aborted = call->status(); !aborted.ok()) {
      DeregisterCall(call, args);
      delete call;
      return fail(aborted);
    }
    Ref();
    call->Start([this, call, args, done = std::move(done)] {
      DeregisterCall(call, args);
      const absl::Status status = call->status();
      const tensorflow::Tensor tensor = status.ok() ? call->tensor() : tensorflow::Tensor();
      const bool is_dead = status.ok() && call->is_dead();
      // The session may end with the last receive.
      delete call;
      done(status, tensorflow::Rendezvous::Args(), args, tensor, is_dead);
      Unref();
    });
  }
};

class RendezvousTable : public tensorflow::BaseRendezvousMgr {
 public:
  using BaseRendezvousMgr::BaseRendezvousMgr;

 protected:
  tsl::core::RefCountPtr<tensorflow::BaseRemoteRendezvous> Create(
      int64_t step, const tensorflow::WorkerEnv* env) override {
    return tsl::core::RefCountPtr<tensorflow::BaseRemoteRendezvous>(new Rendezvous(env, step));
  }
};

}  // namespace pleach

#endif  // PLEACH_TENSORFLOW_RENDEZVOUS_H_

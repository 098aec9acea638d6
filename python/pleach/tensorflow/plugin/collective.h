// The receiver's side of collectives: RING and the others that TensorFlow builds of RecvBuf.
#ifndef PLEACH_TENSORFLOW_COLLECTIVE_H_
#define PLEACH_TENSORFLOW_COLLECTIVE_H_

#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "links.h"
#include "receive.h"
#include "tensorflow/core/common_runtime/base_collective_executor.h"
#include "tensorflow/core/distributed_runtime/collective_param_resolver_distributed.h"
#include "tensorflow/core/distributed_runtime/collective_rma_distributed.h"
#include "tensorflow/core/distributed_runtime/device_resolver_distributed.h"
#include "tensorflow/core/distributed_runtime/request_id.h"
#include "tensorflow/core/distributed_runtime/rpc_collective_executor_mgr.h"
#include "tensorflow/core/distributed_runtime/worker_cache.h"
#include "tensorflow/core/framework/cancellation.h"
#include "tensorflow/core/nccl/collective_communicator.h"
#include "tensorflow/core/protobuf/transport_options.pb.h"

namespace pleach {

// One receive into a buffer: RecvBuf, and the fetch of the offer that may be its answer. It holds
// itself until its end.
class BufferCall : public std::enable_shared_from_this<BufferCall> {
 public:
  BufferCall(std::string task, tensorflow::WorkerCacheInterface* workers,
             tensorflow::WorkerInterface* worker, tensorflow::Device* device,
             tensorflow::Tensor* target,
             tensorflow::StatusCallback done)
      : task_(std::move(task)),
        workers_(workers),
        worker_(worker),
        device_(device),
        target_(target),
        done_(std::move(done)) {}

  tensorflow::RecvBufRequest* request() { return &request_; }

  void Start() {
    const auto call = shared_from_this();
    Links::Get()->Find(task_, {this, worker_, device_, [call] { return call->is_cancelled(); },
                               [call](const absl::Status& status, std::shared_ptr<Link> link) {
                                 call->Request(status, std::move(link));
                               }});
  }

  void Cancel() {
    std::shared_ptr<Fetch> fetch;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      is_cancelled_ = true;
      if (has_ended_) return;
      fetch = fetch_;
    }
    Links::Get()->Leave(task_, this);
    options_.StartCancel();
    if (fetch != nullptr) fetch->Cancel();
  }

 private:
  bool is_cancelled() {
    std::lock_guard<std::mutex> lock(mutex_);
    return is_cancelled_;
  }

  void Request(const absl::Status& found, std::shared_ptr<Link> link) {
    link_ = std::move(link);
    if (!found.ok()) return End(found);
    if (link_ != nullptr) Write(Ask{link_->incarnation()}, request_.mutable_transport_options());
    worker_->RecvBufAsync(&options_, &request_, &response_,
                          [call = shared_from_this()](const absl::Status& status) {
                            call->Answered(status);
                          });
    // A cancellation that came before the request could be cancelled has not reached it.
    if (is_cancelled()) options_.StartCancel();
  }

  void Answered(const absl::Status& status) {
    if (!status.ok()) {
      if (absl::IsUnavailable(status)) Links::Get()->Lost(task_, link_);
      return End(status);
    }
    Offer offer;
    if (!Read(response_.transport_options(), &offer)) {
      ReceivedCounts::Get()->CountByGrpc();
      const absl::Status allowed = Links::Get()->NotOffered(task_, link_);
      return End(allowed.ok() ? Copy() : allowed);
    }
    if (link_ == nullptr) return End(absl::DataLossError("an offer came that was not asked for"));
    auto done = [call = shared_from_this(), type = offer.type](const absl::Status& status, Lent lent) {
      if (absl::IsUnavailable(status)) Links::Get()->Lost(call->task_, call->link_);
      if (!status.ok()) return call->End(status);
      if (type != call->target_->dtype())
        return call->End(absl::DataLossError(absl::StrCat(
            tensorflow::DataTypeString(type), " came for a buffer of ",
            tensorflow::DataTypeString(call->target_->dtype()))));
      ReceivedCounts::Get()->Count(lent);
      call->End(call->Copy(lent.data(), lent.bytes()));
    };
    auto fetch = std::make_shared<Fetch>(std::move(done));
    bool is_cancelled = false;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      fetch_ = fetch;
      is_cancelled = is_cancelled_;
    }
    if (is_cancelled) End(absl::CancelledError("the collective was cancelled")), fetch = Dropping(link_);
    fetch->Start(link_->peer(), offer.number, request_.buf_rendezvous_key());
  }

  absl::Status Copy(const void* data, size_t bytes) {
    const absl::string_view target = target_->tensor_data();
    if (bytes != target.size())
      return absl::InternalError(absl::StrCat(bytes, " bytes came for a buffer of ", target.size()));
    std::memcpy(const_cast<char*>(target.data()), data, bytes);
    return absl::OkStatus();
  }

  // Of an answer that brings the bytes itself, in pieces.
  absl::Status Copy() {
    tensorflow::RecvBufRespExtra extra;
    if (!response_.has_transport_options() || !response_.transport_options().UnpackTo(&extra))
      return absl::InternalError("the answer to RecvBuf has no bytes");
    std::string bytes;
    if (extra.tensor_content_size() == 1)
      return Copy(extra.tensor_content(0).data(), extra.tensor_content(0).size());
    for (const auto& piece : extra.tensor_content()) bytes.append(piece.data(), piece.size());
    return Copy(bytes.data(), bytes.size());
  }

  // The last thing that this call does.
  void End(const absl::Status& status) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      has_ended_ = true;
      fetch_ = nullptr;
    }
    workers_->ReleaseWorker(task_, worker_);
    const tensorflow::StatusCallback done = std::move(done_);
    done(Named(status, request_.buf_rendezvous_key(), task_));
  }

  const std::string task_;
  tensorflow::WorkerCacheInterface* const workers_;
  tensorflow::WorkerInterface* const worker_;
  tensorflow::Device* const device_;
  tensorflow::Tensor* const target_;
  tensorflow::StatusCallback done_;
  tensorflow::CallOptions options_;
  tensorflow::RecvBufRequest request_;
  tensorflow::RecvBufResponse response_;
  std::shared_ptr<Link> link_;
  std::mutex mutex_;
  bool is_cancelled_ = false;
  bool has_ended_ = false;
  std::shared_ptr<Fetch> fetch_;
};

class CollectiveAccess : public tensorflow::CollectiveRemoteAccessDistributed {
 public:
  using CollectiveRemoteAccessDistributed::CollectiveRemoteAccessDistributed;

  void RecvFromPeer(const std::string& peer_device, const std::string& peer_task,
                    bool peer_is_local, const std::string& key, tensorflow::Device* device,
                    tensorflow::DeviceContext* context,
                    const tensorflow::AllocatorAttributes& attributes, tensorflow::Tensor* target,
                    const tensorflow::DeviceLocality& locality, int stream,
                    tensorflow::CancellationManager* cancellation,
                    const tensorflow::StatusCallback& done) override {
    tensorflow::DeviceAttributes server;
    const bool may_ask = !peer_is_local && device->device_type() == "CPU" && cancellation != nullptr &&
                         target->TotalBytes() >= kLentBytesMin &&
                         dev_resolver_->GetDeviceAttributes(peer_device, &server).ok();
    tensorflow::WorkerInterface* worker =
        may_ask ? worker_cache_->GetOrCreateWorker(peer_task) : nullptr;
    if (worker == nullptr)
      return CollectiveRemoteAccessDistributed::RecvFromPeer(
          peer_device, peer_task, peer_is_local, key, device, context, attributes, target, locality,
          stream, cancellation, done);
    const auto token = cancellation->get_cancellation_token();
    const auto abortion = abortion_cancel_mgr_.get_cancellation_token();
    auto ended = [this, cancellation, token, abortion, done](const absl::Status& status) {
      cancellation->TryDeregisterCallback(token);
      abortion_cancel_mgr_.TryDeregisterCallback(abortion);
      done(status);
    };
    auto call = std::make_shared<BufferCall>(peer_task, worker_cache_, worker, device, target,
                                             std::move(ended));
    tensorflow::RecvBufRequest* request = call->request();
    request->set_step_id(step_id_);
    request->set_buf_rendezvous_key(key);
    *request->mutable_client_locality() = locality;
    *request->mutable_server_locality() = server.locality();
    request->set_num_bytes(static_cast<int64_t>(target->TotalBytes()));
    request->set_src_device(peer_device);
    request->set_dst_device(device->name());
    request->set_src_incarnation(server.incarnation());
    request->set_request_id(tensorflow::GetUniqueRequestId());
    const std::weak_ptr<BufferCall> weak = call;
    const auto cancel = [weak] {
      if (auto call = weak.lock()) call->Cancel();
    };
    const bool may_go_on = cancellation->RegisterCallback(token, cancel) &&
                           abortion_cancel_mgr_.RegisterCallback(abortion, cancel);
    if (!may_go_on) call->Cancel();
    call->Start();
  }

  // The producer of a buffer waits until it is received, which an aborted receiver does not do.
  void StartAbort(const absl::Status& status) override {
    CollectiveRemoteAccessDistributed::StartAbort(status);
    Exchange::Get()->Withdraw(step_id_);
  }
};

class CollectiveExecutorTable : public tensorflow::RpcCollectiveExecutorMgr {
 public:
  using RpcCollectiveExecutorMgr::RpcCollectiveExecutorMgr;

  // As TensorFlow makes its own for a task.
  static CollectiveExecutorTable* New(const tensorflow::ConfigProto& config,
                                      const tensorflow::DeviceMgr* devices,
                                      tensorflow::WorkerCacheInterface* workers,
                                      const std::string& task) {
    auto resolver = std::make_unique<tensorflow::DeviceResolverDistributed>(devices);
    auto communicator = tensorflow::MaybeCreateNcclCommunicator(config);
    auto parameters = std::make_unique<tensorflow::CollectiveParamResolverDistributed>(
        config, devices, resolver.get(), communicator.get(), workers, task);
    return new CollectiveExecutorTable(config, devices, std::move(resolver), std::move(parameters),
                                       std::move(communicator), workers, task);
  }

 protected:
  tensorflow::CollectiveExecutor* Create(int64_t step) override {
    auto* access = new CollectiveAccess(dev_mgr_, dev_resolver_.get(), work_queue_, worker_cache_,
                                        step, task_name_);
    return new tensorflow::BaseCollectiveExecutor(this, access, step, dev_mgr_, work_queue_);
  }
};

}  // namespace pleach

#endif  // PLEACH_TENSORFLOW_COLLECTIVE_H_

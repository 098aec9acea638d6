//! Collectives on a GPU's memory, with a fake driver everywhere and with a real one where there is
//! a GPU: `cargo test -p pleach-collectives --test gpu_memory -- --ignored gpu::`.

#[path = "gpu_memory/batches.rs"]
mod batches;
#[path = "gpu_memory/between_processes.rs"]
mod between_processes;
#[path = "../../transport/tests/fake_cuda/mod.rs"]
mod fake_cuda;
#[path = "gpu_memory/group.rs"]
mod group;
#[path = "gpu_memory/kernels.rs"]
mod kernels;
#[path = "ranks/meeting.rs"]
mod meeting;
#[path = "gpu_memory/partial.rs"]
mod partial;
#[path = "gpu_memory/persistent.rs"]
mod persistent;
mod ranks;
#[path = "../../tests/rdma_devices/mod.rs"]
mod rdma_devices;
#[path = "gpu_memory/session.rs"]
mod session;
#[path = "gpu_memory/sound.rs"]
mod sound;
#[path = "gpu_memory/starts.rs"]
mod starts;

/// Real GPUs are used by one test at a time: a driver frees memory and unloads kernels only after
/// the work of other tests, and a test that keeps a stream busy takes for granted that it does not.
fn alone_on_the_gpu() -> std::sync::MutexGuard<'static, ()> {
    static GPU: std::sync::Mutex<()> = std::sync::Mutex::new(());
    GPU.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// Each of these against the fake driver, and, where a test is asked for by `--ignored gpu::`,
/// against the real one.
macro_rules! on_both {
    ($($module:ident::$name:ident)*) => {
        mod fake {
            $(#[test]
            fn $name() {
                crate::fake_cuda::load();
                crate::$module::$name(&pleach_transport::cuda::Gpu::open(0).expect("the fake driver has a GPU"));
            })*
        }
        mod gpu {
            $(#[test]
            #[ignore = "needs an NVIDIA GPU: where there is one, run it with --ignored gpu::"]
            fn $name() {
                let _gpu = crate::alone_on_the_gpu();
                crate::$module::$name(&pleach_transport::cuda::Gpu::open(0).expect("a GPU"));
            })*
        }
    };
}

on_both! {
    kernels::every_kernel_gives_the_bits_that_the_host_gives
    kernels::destinations_may_be_sources_and_places_may_lie_anywhere
    kernels::more_places_than_a_kernel_takes_are_refused
    kernels::a_job_that_is_dropped_is_under_way_until_the_gpu_is_idle
    group::collectives_over_tcp_give_the_same_as_on_the_host
    group::collectives_over_shm_give_the_same_as_on_the_host
    group::links_between_gpus_are_measured
    group::every_type_is_reduced_as_on_the_host
    group::a_call_begins_after_the_earlier_work_of_its_stream
    group::memory_of_others_is_taken_while_it_is_there
    group::data_in_other_memory_than_the_groups_are_refused
    group::inputs_and_outputs_that_overlap_are_refused_unless_they_are_in_place
    group::a_gpu_that_is_not_there_is_told_at_join
    group::a_group_on_a_gpu_can_be_split
    group::reproducible_groups_give_the_same_bits_and_exact_ones_refuse
    group::a_rank_that_is_lost_ends_the_call_with_its_name
    sound::buffers_and_streams_go_in_any_order_while_calls_use_them
    sound::rounds_that_are_forgotten_or_dropped_half_done_touch_no_memory_of_others
    sound::gpu_buffers_outlive_their_group_and_calls_its_last_handle
    session::who_joins_over_tcp_has_the_state_that_is_on_the_gpu
    session::who_joins_over_shm_has_the_state_that_is_on_the_gpu
    session::a_session_has_memory_of_the_kind_that_its_groups_work_on
    starts::a_started_call_comes_after_the_earlier_work_of_its_stream
    starts::a_thread_of_the_group_carries_started_calls_on
    starts::every_call_that_can_be_started_gives_what_the_blocking_one_gives
    starts::memory_that_is_freed_before_its_call_begins_ends_the_group_with_the_reason
    batches::a_batch_gives_what_its_operations_give_one_by_one
    batches::a_batch_begins_after_the_earlier_work_of_its_streams
    batches::a_batch_that_is_started_gives_what_one_that_is_run_gives
    batches::several_batches_are_under_way_at_once_and_more_operations_than_fit
    batches::sends_and_receives_of_a_batch_do_not_wait_for_each_other
    batches::what_cannot_be_in_a_batch_is_refused_and_the_rest_is_carried_out
    batches::tensors_of_other_lengths_are_a_mismatch_though_all_together_are_as_long
    batches::memory_that_is_freed_before_its_batch_begins_ends_the_group_with_the_reason
    persistent::a_prepared_call_gives_the_result_of_the_plain_one_as_often_as_it_is_run
    persistent::every_prepared_collective_is_the_plain_one_and_matches_it
    persistent::a_run_comes_after_the_earlier_work_of_its_stream
    persistent::what_cannot_be_prepared_or_run_is_told_and_the_memory_comes_back
    partial::late_contributions_on_a_gpu_are_carried_dropped_or_corrected
    partial::rounds_on_a_gpu_give_the_bits_of_rounds_on_the_host
    partial::a_contribution_is_ready_when_its_stream_has_done_the_work_before
    partial::what_rounds_on_a_gpu_cannot_do_is_refused
}

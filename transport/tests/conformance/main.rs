//! The conformance suite: the device contract (`pleach_transport::device`), one module a line, run
//! against every backend.
//!
//! To add a backend implement [`world::Backend`] for it in a file here (about twenty lines: how a
//! device and its memory are made, and what time it is) and name it in `backends!` below. A test
//! that does not apply to a backend says so on the terminal with the reason.
//!
//! Beside the contract: what a pair of queue pairs says that refuses something (`verbs`), and what
//! only devices made of software show, on a machine whose links tests may change (`softroce`).
//!
//! What the suite takes for granted beside the text of the contract: a key that a peer learned from
//! a message is known to it, and so is that a region was released before a message was sent.

mod atomics;
mod backpressure;
mod completion;
mod connect;
mod drain;
mod fence;
mod isolation;
mod keys;
mod lending;
mod loss;
mod mappings;
mod messages;
mod polling;
mod progress;
mod puts;
#[path = "../../../tests/rdma_devices/mod.rs"]
mod rdma_devices;
mod regions;
mod returning;
#[path = "../../../tests/skipped/mod.rs"]
mod skipped;
mod wake;
mod world;

mod hybrid;
mod shm;
mod sim;
mod softroce;
mod tcp;
mod verbs;

/// One test for each name of each line, in a module of the backend's name.
macro_rules! tests {
    // An attribute for each test is a token tree, which may stand in both repetitions.
    ($backend:ty, $attributes:tt; $($line:ident { $($test:ident)* })*) => {
        $(mod $line {
            $(one_test! { $backend, $attributes, $line, $test })*
        })*
    };
}

macro_rules! one_test {
    ($backend:ty, [$($attribute:tt)*], $line:ident, $test:ident) => {
            #[test]
            $($attribute)*
            fn $test() {
                <$backend as crate::world::Backend>::repeat(|| {
                    crate::$line::$test(crate::world::BackendKind::of::<$backend>());
                });
            }
    };
}

macro_rules! backends {
    ($($name:ident: $backend:ty $([$($attribute:tt)*])?),* $(,)?) => {
        $(mod $name { suite!($backend, [$($($attribute)*)?]); })*
    };
}

macro_rules! suite {
    ($backend:ty, $attributes:tt) => {
        tests! { $backend, $attributes;
            puts {
                bytes_of_every_length_and_alignment_are_there_when_the_signal_is
                a_put_without_signal_arrives_and_touches_no_signal_slot
                a_put_of_the_maximum_length_works
                a_signal_carries_payload_of_every_length
                a_put_carries_payload_beside_its_bytes
                an_inline_put_needs_no_region
                signal_slots_are_counted_apart_for_each_signal_slot_and_peer
                a_thread_that_polls_nothing_sees_the_bytes_with_the_signal
                a_source_may_be_overwritten_when_its_put_is_done
                a_get_is_done_when_its_bytes_are_here
                all_pairs_move_different_bytes_at_once
            }
            atomics {
                an_add_returns_the_old_value_and_wraps
                a_compare_swap_stores_only_where_the_value_is_expected
                adds_of_several_peers_are_all_counted
                adds_of_peers_on_different_threads_are_all_counted
            }
            completion {
                every_transfer_is_done_once
                the_submitter_chooses_names_that_need_not_differ
                every_transfer_is_done_once_also_after_a_loss
                every_transfer_is_done_once_also_after_severing
                every_transfer_is_done_once_also_when_the_peer_leaves
            }
            loss {
                a_rank_that_ends_without_bye_is_lost_once
                a_loss_reaches_the_responder_while_nobody_polls
                what_a_rank_said_is_told_before_its_loss
                what_a_leaving_rank_sent_arrives_before_its_bye
                long_transfers_and_messages_of_a_leaving_rank_arrive_before_its_bye
                a_rank_that_left_is_refused_as_having_left
                ranks_that_leave_at_the_same_time_lose_nobody
                a_flushed_rank_may_be_dropped_without_losing_what_it_sent
                what_a_gone_rank_sent_arrives_though_its_peer_still_writes_to_it
                a_lost_rank_is_not_mapped
            }
            backpressure {
                a_full_queue_is_an_error_without_a_trace
                polling_makes_room_every_time
                both_ends_may_have_full_queues_at_once
                a_full_queue_to_one_peer_leaves_the_others_alone
            }
            regions {
                a_region_dropped_while_its_puts_are_under_way_is_still_read
                a_region_dropped_while_a_get_fills_it_stays_until_the_end
                a_target_dropped_while_puts_to_it_are_under_way_harms_nobody
                memory_may_be_registered_twice_and_again
                registrations_are_counted
                a_region_registered_before_connecting_is_reached
                many_regions_come_and_go
            }
            keys {
                a_forged_key_reaches_nothing
                the_key_of_no_region_reaches_nothing
                a_key_next_to_a_real_one_reaches_nothing
                the_key_of_a_dropped_region_reaches_nothing
                a_key_of_another_rank_reaches_nothing
                a_range_beyond_the_region_reaches_nothing
                a_range_whose_end_overflows_reaches_nothing
                different_lengths_are_not_accepted
                a_region_of_another_device_is_not_accepted
                a_signal_slot_that_does_not_exist_is_not_accepted
                a_misaligned_word_is_not_accepted
                more_than_the_maximum_is_not_accepted
                a_peer_that_is_not_connected_is_not_accepted
            }
            fence {
                a_severed_peer_that_keeps_writing_changes_no_byte
                the_signal_slots_of_a_severed_peer_change_no_more
                a_peer_that_is_stopped_while_it_is_severed_and_continued_later_changes_no_byte
                a_peer_on_another_thread_changes_no_byte_after_the_fence
                severing_ends_what_is_under_way_and_refuses_the_rest
                a_get_under_way_writes_nothing_after_the_fence
                severing_one_peer_keeps_the_others
                severing_a_lost_peer_ends_as_well
                ranks_may_sever_each_other_at_once
            }
            progress {
                a_passive_fabric_needs_no_polling_of_the_target
                a_rank_that_was_not_polled_for_a_while_catches_up
                long_transfers_both_ways_end_together
            }
            wake {
                signals_wake_a_sleeper_every_time
                a_signal_at_each_point_of_the_loop_wakes_a_sleeper
                the_end_of_a_transfer_wakes_a_sleeper
                a_wake_source_armed_when_something_is_there_already_does_not_keep_silent
                a_message_wakes_a_sleeper
                any_thread_wakes
                a_loss_wakes_a_sleeper
                a_bye_wakes_a_sleeper
                a_fence_wakes_a_sleeper
                a_drain_wakes_a_sleeper
                a_connection_wakes_a_sleeper
            }
            mappings {
                a_fabric_that_does_not_map_says_so
                a_mapping_shows_what_the_owner_wrote
                what_is_written_through_a_mapping_is_there_when_a_later_signal_is
                mappings_and_puts_see_the_same_memory
                what_is_not_there_is_not_mapped
                a_severed_peer_writes_through_its_mapping_in_vain
                a_reader_is_told_when_the_owner_has_taken_the_bytes_away
                a_mapping_outlives_its_owner
            }
            lending {
                lent_memory_is_read_by_gets
                lent_memory_is_its_owners_source_and_destination
                nothing_is_written_into_lent_memory
                lent_memory_is_mapped_to_be_read
                a_mapping_to_be_read_shows_any_memory
                severing_takes_lent_memory_from_nobody
            }
            isolation {
                memory_for_one_peer_is_that_peers_alone
                memory_is_registered_for_a_peer_that_exists
                a_key_is_for_its_own_peer_also_where_it_follows_another
                severing_one_peer_leaves_the_memory_of_others
                severing_a_peer_that_never_came_leaves_all_memory
                memory_for_a_severed_peer_is_fenced
            }
            returning {
                a_killed_process_is_replaced_and_others_are_not_touched
                a_process_that_left_is_replaced
                a_process_that_comes_before_its_rank_is_free_is_waited_for
                a_process_that_comes_first_or_last_is_connected
                a_severed_process_does_not_get_its_rank_back
                what_a_former_process_was_given_is_bad_for_its_successor
                a_rank_is_not_free_before_its_end_was_polled
                many_processes_have_one_rank_one_after_the_other
                severing_takes_back_what_former_processes_could_write
                devices_of_different_worlds_meet
            }
            drain {
                all_from_before_has_landed_when_a_pair_is_drained
                nobody_is_told_before_both_ends_have_drained
                each_drain_is_told_in_turn
                later_transfers_work_and_keep_no_drain_waiting
                a_pair_is_drained_whatever_others_have_under_way
                a_refused_transfer_has_ended
                the_end_of_a_pair_comes_in_place_of_drained
                a_peer_that_dies_is_drained_or_lost
                a_peer_that_is_not_connected_is_not_drained
                too_many_drains_are_refused_until_the_peer_drains
                survivors_of_a_severed_peer_set_nothing_up_anew
                a_successor_is_drained_anew
            }
            messages {
                messages_arrive_whole_and_in_order
                an_empty_message_arrives
                a_question_is_answered
                a_question_is_answered_while_the_asked_rank_does_not_poll
                what_a_responder_passes_on_goes_out_while_its_rank_does_not_poll
                a_message_goes_out_while_its_sender_does_not_poll
                a_message_that_is_too_long_is_not_sent
                a_message_to_a_peer_that_is_not_connected_is_not_sent
                messages_pass_while_long_transfers_are_under_way
                too_many_messages_are_refused_until_there_is_room
                an_urgent_message_has_room_where_the_queue_is_full
            }
            connect {
                every_pair_is_connected_once
                ends_may_connect_at_different_times_in_either_order
                transfers_work_as_soon_as_connected_was_seen
                a_rank_that_is_no_peer_is_refused
                a_text_that_is_no_address_is_refused
                a_peer_that_is_gone_before_it_was_connected_is_not_waited_for_in_vain
                a_peer_that_ends_while_it_connects_is_lost_once
                ranks_with_the_same_secret_connect
                worlds_side_by_side_do_not_meet
                a_device_says_the_same_of_itself_always_and_both_ends_are_reached_alike
            }
            polling {
                room_for_one_event_is_enough
                nothing_is_lost_for_want_of_room
                what_is_in_the_vector_stays
            }
        }
    };
}

mod backend {
    backends! {
        hybrid_here: crate::hybrid::Hybrid<true>,
        hybrid_across: crate::hybrid::Hybrid<false>,
        hybrid_rdma_here: crate::hybrid::Hybrid<true, true> [#[ignore = "needs RDMA devices: where there are some, run it with --ignored"]],
        hybrid_rdma_across: crate::hybrid::Hybrid<false, true> [#[ignore = "needs RDMA devices: where there are some, run it with --ignored"]],
        shm: crate::shm::Shm<false>,
        shm_mapped: crate::shm::Shm<true>,
        sim: crate::sim::Sim<false>,
        sim_mapped: crate::sim::Sim<true>,
        tcp: crate::tcp::Tcp<false>,
        tcp_tls: crate::tcp::Tcp<true>,
        verbs: crate::verbs::Verbs<false> [#[ignore = "needs RDMA devices: where there are some, run it with --ignored"]],
        verbs_cm: crate::verbs::Verbs<false, true> [#[ignore = "needs RDMA devices: where there are some, run it with --ignored"]],
        verbs_cm_wide: crate::verbs::Verbs<true, true> [#[ignore = "needs RDMA devices: where there are some, run it with --ignored"]],
        verbs_wide: crate::verbs::Verbs<true> [#[ignore = "needs RDMA devices: where there are some, run it with --ignored"]],
    }

    /// The tests in which a rank is given to another process.
    macro_rules! successors {
        ($($name:ident: $backend:ty),*) => {
            $(mod $name {
                tests! { $backend, [];
                    returning {
                        a_killed_process_is_replaced_and_others_are_not_touched
                        a_process_that_left_is_replaced
                        a_process_that_comes_before_its_rank_is_free_is_waited_for
                        a_process_that_comes_first_or_last_is_connected
                        a_severed_process_does_not_get_its_rank_back
                        what_a_former_process_was_given_is_bad_for_its_successor
                        many_processes_have_one_rank_one_after_the_other
                        severing_takes_back_what_former_processes_could_write
                    }
                    drain {
                        a_successor_is_drained_anew
                    }
                }
            })*
        };
    }

    successors! {
        hybrid_from_here: crate::hybrid::Moving<true>,
        hybrid_from_across: crate::hybrid::Moving<false>
    }
}

//! A minimal bad schedule for every kind of violation.

use super::{good, parse, prove, verify};

/// A good schedule with one thing changed, and what is said of it.
fn refused(name: &str, from: &str, to: &str) -> String {
    let text = good(name);
    assert!(text.contains(from), "nothing to change in {name}: {from}");
    match prove(&text.replacen(from, to, 1)) {
        Ok(_) => panic!("{name} with '{to}' instead of '{from}' was accepted"),
        Err(violation) => violation.to_string(),
    }
}

/// What is said of a schedule of two ranks with one block, given collective, window and programs.
fn refused_pair(collective: &str, window: u32, zero: &[&str], one: &[&str]) -> String {
    prove(&pair(collective, &window.to_string(), zero, one)).expect_err("refused").to_string()
}

fn pair(collective: &str, window: &str, zero: &[&str], one: &[&str]) -> String {
    let program = |steps: &[&str]| -> String {
        steps.iter().enumerate().map(|(number, step)| format!("    {number}: {step}\n")).collect()
    };
    format!(
        "pleach-schedule 1\ncollective {collective}\nranks 2\nwindow {window}\nblock 0 part 0 weight 1\n\
         rank 0\n  lane block 0\n{}rank 1\n  lane block 0\n{}",
        program(zero),
        program(one)
    )
}

#[test]
fn forms_are_checked() {
    let chain = "broadcast-chain-of-3";
    assert_eq!(refused(chain, "window 2", "window 0"), "the window is 0 chunks; it is at least 1");
    assert_eq!(
        refused(chain, "window 2", "window 65"),
        "the schedule has 65 chunks under way; at most 64 can be verified"
    );
    assert_eq!(refused(chain, "root 0", "root 3"), "broadcast root 3 names rank 3, but there are 3 ranks");
    assert_eq!(
        refused("all-gather-of-2", "block 1 part 1", "block 1 part 0"),
        "part 1 has data, but no block covers it"
    );
    assert_eq!(
        refused("all-gather-of-2", "block 1 part 1", "block 1 part 2"),
        "block 1 is of part 2, but there are 2 parts"
    );
    assert_eq!(refused(chain, "weight 1", "weight 0"), "block 0 has weight 0; it is at least 1");
    assert_eq!(
        refused(chain, "lane block 0", "lane block 7"),
        "rank 0 lane 0 is of block 7, but there are 1 blocks"
    );
    assert_eq!(
        refused(chain, "wait 1 slot 0", "wait 5 slot 0"),
        "rank 0 lane 0 (block 0) step 1 names rank 5, but there are 3 ranks"
    );
    assert_eq!(
        refused(chain, "wait 1 slot 0", "wait 0 slot 0"),
        "rank 0 lane 0 (block 0) step 1 sends a signal to its own rank or waits for one"
    );
    assert_eq!(
        refused(chain, "input -> shared-input, output", "input -> shared-input, shared-input"),
        "rank 0 lane 0 (block 0) step 0 names 0.shared-input twice"
    );
    assert_eq!(
        refused(chain, "copy shared-output -> output", "copy output -> output"),
        "rank 1 lane 0 (block 0) step 2 names 1.output twice"
    );
    assert_eq!(
        refused(chain, "slot 1 after 0", "slot 1 after 2"),
        "rank 0 lane 0 (block 0) step 2 is after step 2 of 0 chunks earlier, which is no earlier step of its lane"
    );
    assert_eq!(
        refused(chain, "slot 1 after 0", "slot 1 after 3@1"),
        "rank 0 lane 0 (block 0) step 2 is after step 3 of 1 chunks earlier, which is no earlier step of its lane"
    );
    assert_eq!(
        refused(chain, "copy shared-output -> output", "copy input -> output"),
        "rank 1 lane 0 (block 0) step 2 uses 1.input, but rank 1 has no such slice of part 0 in this collective"
    );
    let mut empty = parse(good(chain));
    empty.programs.clear();
    assert_eq!(verify(empty).expect_err("nobody").to_string(), "the schedule has no ranks");
    let mut nothing = parse(good(chain));
    if let pleach_schedule::Op::Reduce { from, .. } = &mut nothing.programs[0][0].steps[0].op {
        from.clear();
    }
    assert_eq!(
        verify(nothing).expect_err("no source").to_string(),
        "rank 0 lane 0 (block 0) step 0 has no source or no destination"
    );
}

#[test]
fn places_are_used_as_they_may_be() {
    let (ring, mapped) = ("all-reduce-ring-of-3", "all-reduce-mapped-direct-of-2");
    assert_eq!(
        refused(mapped, "1.shared-input ->", "1.input ->"),
        "rank 0 lane 0 (block 0) step 3 uses 1.input, which its own rank alone may touch; peers use the shared one"
    );
    assert_eq!(
        refused(ring, "-> 1.shared-output", "-> 1.shared-input"),
        "rank 0 lane 0 (block 0) step 5 puts to 1.shared-input; a put goes to shared-output or scratch of another rank"
    );
    assert_eq!(
        refused(mapped, "-> scratch-0", "-> input"),
        "rank 0 lane 0 (block 0) step 3 writes 0.input; inputs are never written, and a shared-input only as a copy of \
         its rank's own input"
    );
    assert_eq!(
        refused(mapped, "-> scratch-0", "-> 1.shared-input"),
        "rank 0 lane 0 (block 0) step 3 writes 1.shared-input; inputs are never written, and a shared-input only as a \
         copy of its rank's own input"
    );
    assert_eq!(
        refused(
            "broadcast-chain-of-3",
            "copy shared-output -> output",
            "reduce shared-output + scratch-0 -> output"
        ),
        "rank 1 lane 0 (block 0) step 2 combines several sources, but broadcast root 0 combines nothing"
    );
}

#[test]
fn every_signal_has_one_wait_and_every_wait_one_signal() {
    let chain = "broadcast-chain-of-3";
    assert_eq!(
        refused(chain, "    1: wait 1 slot 0\n    2: put shared-input -> 1.shared-output slot 1 after 0", {
            "    1: put shared-input -> 1.shared-output slot 1 after 0"
        }),
        "rank 1 lane 0 (block 0) step 0 signals slot 0 of rank 0, where no wait consumes it"
    );
    assert_eq!(
        refused(chain, "0: signal 1 slot 0", "0: signal 1 slot 3"),
        "rank 1 lane 0 (block 0) step 3 waits for slot 0 from rank 2, which never signals it"
    );
    assert_eq!(
        refused(chain, "4: put shared-output -> 2.shared-output slot 1", {
            "4: put shared-output -> 2.shared-output slot 1\n    5: signal 2 slot 1"
        }),
        "rank 1 lane 0 (block 0) step 5 signals slot 1 again, which rank 1 lane 0 (block 0) step 4 signals in the \
         same chunk"
    );
    assert_eq!(
        refused(chain, "    3: wait 2 slot 0\n", "    3: wait 0 slot 1\n"),
        "rank 1 lane 0 (block 0) step 3 waits again for slot 1, for which rank 1 lane 0 (block 0) step 1 waits in the \
         same chunk"
    );
    // Nothing comes back: the sender may be a window ahead.
    assert_eq!(
        refused_pair(
            "send-recv from 0 to 1",
            3,
            &["copy input -> shared-input", { "put shared-input -> 1.scratch-0 slot 4 after 0" }],
            &["wait 0 slot 4", "copy scratch-0 -> output"]
        ),
        "rank 0 lane 0 (block 0) step 1 chunk 3 may signal slot 4 before rank 1 lane 0 (block 0) step 0 has consumed \
         the signal of chunk 0 in it"
    );
}

#[test]
fn what_keeps_chunks_apart_is_not_asked_for_where_there_is_but_one() {
    let send: &[&str] = &["put input -> 1.scratch-0 slot 4"];
    let receive: &[&str] = &["wait 0 slot 4", "copy scratch-0 -> output"];
    let (collective, single) = ("send-recv from 0 to 1", "1 single-chunk");
    let said = refused_pair(collective, 1, send, receive);
    assert!(said.contains("chunk 1 may signal slot 4 before"), "{said}");
    prove(&pair(collective, single, send, receive)).expect("one chunk cannot be taken for another");
    // What goes wrong within a chunk does there too.
    let early: &[&str] = &["copy scratch-0 -> output", "wait 0 slot 4"];
    let said = prove(&pair(collective, single, send, early)).expect_err("it reads too early").to_string();
    assert!(said.contains("scratch-0"), "{said}");
}

#[test]
fn a_deadlock_names_the_steps_that_wait_for_each_other() {
    let said = refused_pair("barrier", 1, &["wait 1 slot 0", "signal 1 slot 0"], {
        &["wait 0 slot 0", "signal 0 slot 0"]
    });
    assert!(said.starts_with("deadlock: rank "), "{said}");
    for site in ["rank 0 lane 0 (block 0) step 0", "rank 1 lane 0 (block 0) step 0"] {
        assert!(said.contains(site), "{said}");
    }
}

#[test]
fn a_race_names_both_accesses() {
    // Within a chunk: the put does not wait for the copy.
    assert_eq!(
        refused("broadcast-chain-of-3", "slot 1 after 0", "slot 1"),
        "race: rank 0 lane 0 (block 0) step 0 chunk 0 writes 0.shared-input, and rank 0 lane 0 (block 0) step 2 \
         chunk 0 reads 0.shared-input, in no order"
    );
    // A chunk later: the credit is given before the scratch has been read.
    assert_eq!(
        refused_pair(
            "send-recv from 0 to 1",
            2,
            &[
                "copy input -> shared-input",
                "put shared-input -> 1.scratch-0 slot 0 after 0",
                "wait 1 slot 1"
            ],
            &["wait 0 slot 0", "copy scratch-0 -> output", "signal 0 slot 1"],
        ),
        "race: rank 1 lane 0 (block 0) step 1 chunk 0 reads 1.scratch-0, and rank 0 lane 0 (block 0) step 1 chunk 2 \
         writes 1.scratch-0, in no order"
    );
    // Only in place: the output is written while the peer reads the input, which is the same memory
    // then.
    assert_eq!(
        refused("all-reduce-mapped-direct-of-2", "-> scratch-0", "-> scratch-0, output"),
        "race: rank 0 lane 0 (block 0) step 3 chunk 0 writes 0.output, and rank 1 lane 0 (block 0) step 3 chunk 0 \
         reads 0.shared-input, in no order"
    );
}

#[test]
fn peers_are_touched_only_while_they_take_part() {
    assert_eq!(
        refused_pair("send-recv from 0 to 1", 1, &["wait 1 slot 0", "signal 1 slot 1"], {
            &["copy 0.shared-input -> output", "signal 0 slot 0 after 0", "wait 0 slot 1"]
        }),
        "rank 1 lane 0 (block 0) step 0 chunk 0 reads 0.shared-input before it has waited for a signal of rank 0"
    );
    assert_eq!(
        refused_pair(
            "send-recv from 1 to 0",
            1,
            &["wait 1 slot 0", "signal 1 slot 1", "copy 1.shared-input -> output"],
            &["signal 0 slot 0", "wait 0 slot 1"]
        ),
        "rank 0 lane 0 (block 0) step 2 chunk 0 reads 1.shared-input, and rank 1 may end before that is over"
    );
    assert_eq!(
        refused_pair(
            "send-recv from 0 to 1",
            1,
            &[
                "copy input -> shared-input",
                "put shared-input -> 1.shared-output slot 0 after 0",
                "wait 1 slot 1"
            ],
            &["wait 0 slot 0", "copy shared-output -> output", "signal 0 slot 1 after 1"],
        ),
        "rank 0 lane 0 (block 0) step 1 chunk 0 writes 1.shared-output before it has waited for a signal of rank 1"
    );
}

/// A schedule of two ranks that reduces to rank 0: rank 1 sends, rank 0 does `steps` between its
/// wait and its signal.
fn refused_reduce(steps: &[&str]) -> String {
    let mut zero = vec!["wait 1 slot 0"];
    zero.extend(steps);
    let last = format!(
        "signal 1 slot 1 after {}",
        (1..=steps.len()).map(|step| format!("{step} ")).collect::<String>()
    );
    zero.push(&last);
    let one =
        ["copy input -> shared-input", "put shared-input -> 0.scratch-0 slot 0 after 0", "wait 0 slot 1"];
    refused_pair("reduce root 0", 2, &zero, &one)
}

#[test]
fn results_are_what_the_collective_demands() {
    assert_eq!(
        refused("all-reduce-ring-of-3", "-> scratch-1", "-> scratch-2"),
        "rank 0 lane 2 (block 2) step 3 reads 0.scratch-1, in which nothing has been written"
    );
    assert_eq!(
        refused("broadcast-chain-of-3", "copy shared-output -> output", "copy output -> scratch-3"),
        "rank 1 lane 0 (block 0) step 2 reads 1.output, in which nothing has been written"
    );
    assert_eq!(
        refused("all-reduce-mapped-direct-of-2", "reduce shared-input + 1.shared-input", {
            "reduce shared-input + 1.shared-input + input"
        }),
        "rank 0 lane 0 (block 0) step 3 counts the contribution of rank 0 twice, in 0.input"
    );
    assert_eq!(
        refused_reduce(&[
            "reduce input + scratch-0 -> scratch-1",
            "reduce scratch-1 + scratch-0 -> output after 1"
        ]),
        "rank 0 lane 0 (block 0) step 2 counts the contribution of rank 1 twice, in 0.scratch-0"
    );
    assert_eq!(
        refused_reduce(&["reduce input + scratch-0 -> scratch-1"]),
        "rank 0 ends without its output of block 0"
    );
    assert_eq!(
        refused_reduce(&["copy scratch-0 -> output"]),
        "rank 0 ends without the contribution of rank 0 in block 0 of its output"
    );
}

#[test]
fn results_depend_on_no_placement() {
    // In place the first step overwrites the input.
    assert_eq!(
        refused_reduce(&["copy scratch-0 -> output", "reduce input + scratch-0 -> output after 1"]),
        "rank 0 lane 0 (block 0) step 2 reads something else in 0.input when it is so with rank 0: input and \
         shared-input apart, output and shared-output apart, input and output the same memory"
    );
    assert_eq!(
        refused_reduce(&["reduce input + scratch-0 -> output", "copy scratch-0 -> shared-output after 1"]),
        "rank 0 ends with something else in block 0 of its output when it is so: input and shared-input apart, output \
         and shared-output the same memory, input and output apart"
    );
}

/// Three ranks that read each other's inputs; `sources` says in which order rank r adds.
fn mapped_direct_of_3(sources: fn(u32) -> [u32; 3]) -> String {
    let mut text =
        "pleach-schedule 1\ncollective all-reduce\nranks 3\nwindow 1\nblock 0 part 0 weight 1\n".to_owned();
    for rank in 0..3 {
        let (next, last) = ((rank + 1) % 3, (rank + 2) % 3);
        let [one, two, three] = sources(rank);
        text += &format!(
            "rank {rank}\n  lane block 0\n    0: copy input -> shared-input\n    1: signal {next} slot 0 after 0\n    \
             2: signal {last} slot 1 after 0\n    3: wait {last} slot 0\n    4: wait {next} slot 1\n    \
             5: reduce {one}.shared-input + {two}.shared-input + {three}.shared-input -> scratch-0\n    \
             6: signal {next} slot 2 after 5\n    7: signal {last} slot 3 after 5\n    8: wait {last} slot 2\n    \
             9: wait {next} slot 3\n    10: copy scratch-0 -> output\n"
        );
    }
    text
}

#[test]
fn ranks_combine_in_the_same_order() {
    prove(&mapped_direct_of_3(|_| [2, 0, 1])).expect("the same order everywhere");
    prove(&mapped_direct_of_3(|rank| [[0, 1, 2], [1, 0, 2], [0, 1, 2]][rank as usize]))
        .expect("the first two commute");
    assert_eq!(
        prove(&mapped_direct_of_3(|rank| [rank, (rank + 1) % 3, (rank + 2) % 3]))
            .expect_err("refused")
            .to_string(),
        "ranks 0 and 1 end with block 0 combined in different orders: their bits may differ"
    );
}

/// The lanes of the second text become lanes of a second block of the first.
fn two_blocks(first: &str, second: &str) -> pleach_schedule::Schedule {
    let mut schedule = parse(first);
    schedule.blocks.push(schedule.blocks[0]);
    for (program, lanes) in schedule.programs.iter_mut().zip(parse(second).programs) {
        program.extend(lanes.into_iter().map(|lane| pleach_schedule::Lane { block: 1, ..lane }));
    }
    schedule
}

#[test]
fn a_block_that_is_another_one_renamed_is_not_taken_for_it_when_sources_are_reordered() {
    let good = mapped_direct_of_3(|_| [2, 0, 1]);
    verify(two_blocks(&good, &mapped_direct_of_3(|_| [0, 1, 2]))).expect("one order in each block");
    let differing = mapped_direct_of_3(|rank| [rank, (rank + 1) % 3, (rank + 2) % 3]);
    assert_eq!(
        verify(two_blocks(&good, &differing)).expect_err("refused").to_string(),
        "ranks 0 and 1 end with block 1 combined in different orders: their bits may differ"
    );
    let doubled = mapped_direct_of_3(|rank| if rank == 1 { [0, 2, 0] } else { [0, 1, 2] });
    assert_eq!(
        verify(two_blocks(&good, &doubled)).expect_err("refused").to_string(),
        "rank 1 lane 1 (block 1) step 5 names 0.shared-input twice"
    );
    let without_staging = good.replacen("copy input -> shared-input", "copy input -> scratch-9", 1);
    assert_eq!(
        verify(two_blocks(&good, &without_staging)).expect_err("refused").to_string(),
        "rank 0 lane 1 (block 1) step 5 reads 0.shared-input, in which nothing has been written"
    );
}

#[test]
fn nobody_leaves_a_barrier_before_all_have_entered() {
    let ring: String = (0..3)
        .map(|rank| {
            let (next, last) = ((rank + 1) % 3, (rank + 2) % 3);
            format!("rank {rank}\n  lane block 0\n    0: signal {next} slot 0\n    1: wait {last} slot 0\n")
        })
        .collect();
    let text =
        format!("pleach-schedule 1\ncollective barrier\nranks 3\nwindow 1\nblock 0 part 0 weight 1\n{ring}");
    assert_eq!(
        prove(&text).expect_err("refused").to_string(),
        "rank 0 may leave the barrier before rank 1 has entered it"
    );
}

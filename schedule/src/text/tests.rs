use proptest::prelude::*;

use super::*;

const BROADCAST: &str = "\
pleach-schedule 1
collective broadcast root 0
ranks 2
window 2
block 0 part 0 weight 1
rank 0
  lane block 0
    0: copy input -> shared-input, output
    1: wait 1 slot 0
    2: put shared-input -> 1.shared-output slot 1 after 0
    3: wait 1 slot 2
rank 1
  lane block 0
    0: signal 0 slot 0 after 2@1
    1: wait 0 slot 1
    2: copy shared-output -> output
    3: signal 0 slot 2 after 2
";

#[test]
fn a_printed_schedule_is_the_text_it_was_parsed_from() {
    let schedule = Schedule::parse(BROADCAST).expect("parses");
    assert_eq!(schedule.to_string(), BROADCAST);
    assert_eq!(schedule.programs[1][0].steps[0].after, vec![(2, 1)]);
}

#[test]
fn comments_white_space_and_line_ends_are_free() {
    let spaced: String = BROADCAST
        .replace(" -> ", "->")
        .replace(", ", "\t,  ")
        .replace(": ", " :")
        .lines()
        .flat_map(|line| ["\t", line, " # and so on -> 1\r\n", "  # nothing\n", "\n"])
        .collect();
    assert_eq!(Schedule::parse(&spaced), Schedule::parse(BROADCAST));
}

#[test]
fn errors_name_line_column_and_what_was_expected() {
    let refused = |from: &str, to: &str| {
        let text = BROADCAST.replacen(from, to, 1);
        Schedule::parse(&text).expect_err("refused").to_string()
    };
    assert_eq!(
        refused("wait 1 slot 0", "wait 1 slotted 0"),
        "line 9, column 15: expected 'slot', found 'slotted'"
    );
    assert_eq!(
        refused("1.shared-output slot", "1.sharp-output slot"),
        "line 10, column 30: expected a place: input output shared-input shared-output scratch-0 ..., \
         found 'sharp-output'"
    );
    assert_eq!(refused("    1: wait", "    2: wait"), "line 9, column 5: expected step 1, found 2");
    assert_eq!(refused("ranks 2", "ranks 4000000000"), "line 3, column 7: ranks: at most 16384 are possible");
    assert_eq!(
        refused("rank 1", "rank 2"),
        "line 12, column 6: ranks, as said above: at most 2 are possible"
    );
    assert_eq!(
        refused("put shared-input", "put 1.shared-input"),
        "line 10, column 12: expected a place of this rank as source of a put, found '1.shared-input'"
    );
    assert_eq!(refused("-> shared-input, output", "-> shared-input, "), {
        "line 8, column 35: expected a place: input output shared-input shared-output scratch-0 ..., \
         found the end of the line"
    });
    assert_eq!(
        refused("collective broadcast", "collective brodcast"),
        "line 2, column 12: expected a collective: all-reduce reduce broadcast all-gather reduce-scatter gather \
         scatter all-to-all barrier send-recv, found 'brodcast'"
    );
    assert_eq!(refused("after 2\n", "after 2 x\n"), {
        "line 17, column 32: expected the number of a step, found 'x'"
    });
    assert_eq!(
        Schedule::parse("").expect_err("refused").to_string(),
        "line 1, column 1: expected 'pleach-schedule 1', found the end of the text"
    );
    assert_eq!(refused("slot 2\n", "slot 65536\n"), {
        "line 11, column 20: expected the number of a signal slot, below 65536, found '65536'"
    });
}

fn part() -> impl Strategy<Value = Part> {
    prop_oneof![
        Just(Part::Input),
        Just(Part::Output),
        Just(Part::SharedInput),
        Just(Part::SharedOutput),
        any::<u16>().prop_map(Part::Scratch),
    ]
}

fn places() -> impl Strategy<Value = Vec<Place>> {
    prop::collection::vec((0..4u32, part()).prop_map(|(rank, part)| Place { rank, part }), 1..4)
}

fn operations() -> impl Strategy<Value = Op> {
    prop_oneof![
        (any::<u32>(), any::<u16>())
            .prop_map(|(to, signal_slot)| Op::Signal { to, signal_slot: SignalSlot(signal_slot) }),
        (any::<u32>(), any::<u16>())
            .prop_map(|(from, signal_slot)| Op::Wait { from, signal_slot: SignalSlot(signal_slot) }),
        (any::<u32>(), part(), part(), any::<u16>()).prop_map(|(to, src, dst, signal_slot)| Op::Put {
            to,
            src,
            dst,
            signal_slot: SignalSlot(signal_slot)
        }),
        (places(), places()).prop_map(|(from, into)| Op::Reduce { from, into }),
    ]
}

fn schedules() -> impl Strategy<Value = Schedule> {
    let collective = prop_oneof![
        Just(Collective::AllReduce),
        any::<u32>().prop_map(|root| Collective::Reduce { root }),
        any::<u32>().prop_map(|root| Collective::Broadcast { root }),
        Just(Collective::AllGather),
        Just(Collective::ReduceScatter),
        Just(Collective::Barrier),
        any::<(u32, u32)>().prop_map(|(from, to)| Collective::SendRecv { from, to }),
    ];
    let step = (operations(), prop::collection::vec(any::<(u32, u32)>(), 0..3))
        .prop_map(|(op, after)| Step { op, after });
    let lane =
        (any::<u32>(), prop::collection::vec(step, 0..4)).prop_map(|(block, steps)| Lane { block, steps });
    let block = any::<(u32, u32)>().prop_map(|(part, weight)| Block { part, weight });
    (
        collective,
        any::<(u32, bool)>(),
        prop::collection::vec(block, 0..4),
        prop::collection::vec(prop::collection::vec(lane, 0..3), 0..5),
    )
        .prop_map(|(collective, (window, single_chunk), blocks, programs)| Schedule {
            collective,
            window,
            single_chunk,
            blocks,
            programs,
        })
}

proptest! {
    #[test]
    fn every_schedule_is_parsed_from_what_it_is_printed_as(schedule in schedules()) {
        prop_assert_eq!(Schedule::parse(&schedule.to_string()), Ok(schedule));
    }

    #[test]
    fn no_text_makes_the_parser_panic(text in any::<String>()) {
        let _ = Schedule::parse(&text);
    }

    #[test]
    fn no_damaged_schedule_makes_the_parser_panic(
        at in 0..BROADCAST.len(), length in 0..20usize, instead in "[ -~\n\u{e9}\u{2003}]{0,4}",
    ) {
        let end = (at + length).min(BROADCAST.len());
        let damaged = format!("{}{instead}{}", &BROADCAST[..at], &BROADCAST[end..]);
        if let Ok(schedule) = Schedule::parse(&damaged) {
            prop_assert_eq!(Schedule::parse(&schedule.to_string()), Ok(schedule));
        }
    }
}

use pleach_vocabulary::Collective;

use super::{ExportError, export, import};
use crate::generate::{Access, Algorithm, generate};
use crate::verify::verify;

fn round_trip(collective: Collective, algorithm: &Algorithm, ranks: u32) {
    let schedule = generate(collective, algorithm, ranks, Access::Put).unwrap();
    let exported =
        export(&schedule).unwrap_or_else(|error| panic!("{collective} {algorithm} {ranks}: {error}"));
    let read = import(&exported.xml)
        .unwrap_or_else(|error| panic!("{collective} {algorithm} {ranks}: {error}\n{}", exported.xml));
    assert_eq!(read.collective, collective);
    let proof = verify(read.clone());
    assert!(proof.is_ok(), "{collective} {algorithm} {ranks}: {:?}\n{}\n{read}", proof.err(), exported.xml);
}

#[test]
fn what_is_written_of_any_schedule_of_puts_reads_back_to_one_that_is_proved() {
    let named = |names: &[&str], collective: Collective| {
        for name in names {
            for ranks in [2, 3, 4, 6] {
                round_trip(collective, &name.parse().unwrap(), ranks);
            }
        }
    };
    named(
        &["direct", "ring", "double-tree", "halving-doubling", "recursive-doubling"],
        Collective::AllReduce,
    );
    named(&["direct", "ring", "halving-doubling"], Collective::AllGather);
    named(&["direct", "ring", "halving-doubling"], Collective::ReduceScatter);
    named(&["direct", "chain", "double-tree"], Collective::Broadcast { root: 1 });
    named(&["direct", "chain", "double-tree"], Collective::Reduce { root: 1 });
}

#[test]
fn what_the_format_cannot_say_is_refused() {
    let schedule = generate(Collective::AllReduce, &Algorithm::Ring, 3, Access::Mapped).unwrap();
    assert!(matches!(export(&schedule), Err(ExportError::Mapped { .. })));
    let schedule = generate(Collective::Gather { root: 0 }, &Algorithm::Direct, 3, Access::Put).unwrap();
    assert!(matches!(export(&schedule), Err(ExportError::Collective { .. })));
}

/// Both GPUs send their half to each other, add and send the sum back, in place.
const PAIR: &str = include_str!("../../tests/msccl/pair.xml");

#[test]
fn an_algorithm_of_others_in_place_is_proved() {
    let schedule = import(PAIR).unwrap();
    assert_eq!((schedule.collective, schedule.ranks(), schedule.blocks.len()), (Collective::AllReduce, 2, 2));
    verify(schedule).unwrap();
}

#[test]
fn an_algorithm_that_rccl_ships_is_proved() {
    let schedule = import(include_str!("../../tests/msccl/rccl-alltoall-8n-0-9kb.xml")).unwrap();
    assert_eq!((schedule.collective, schedule.ranks()), (Collective::AllToAll, 8));
    verify(schedule).unwrap();
}

#[test]
fn a_sum_that_lacks_a_contribution_is_read_and_refuted() {
    // The second GPU keeps what it had instead of adding what came.
    let wrong =
        PAIR.replacen("type=\"rrcs\" srcbuf=\"i\" srcoff=\"1\"", "type=\"rcs\" srcbuf=\"i\" srcoff=\"1\"", 1);
    assert_ne!(wrong, PAIR);
    assert!(verify(import(&wrong).unwrap()).is_err());
}

#[test]
fn what_is_wrong_with_an_xml_is_told_with_its_line() {
    for (from, to, line, part) in [
        ("<algo", "<topology", 3, "expected '<algo'"),
        (" inplace=\"1\" redop=\"sum\"", " inplace=\"7\"", 3, "inplace=\"7\""),
        ("coll=\"allreduce\"", "coll=\"alltonext\"", 1, "'alltonext' is no collective"),
        ("ngpus=\"2\"", "ngpus=\"99999999999\"", 3, "ngpus=\"99999999999\""),
        ("ngpus=\"2\"", "ngpus=\"3\"", 3, "GPU 2"),
        ("nchunksperloop=\"2\"", "nchunksperloop=\"1\"", 6, "chunk 1 of a buffer that has 1"),
        (" proto=\"LL\" nchannels=\"1\" nchunksperloop=\"2\"", "", 3, "no attribute 'nchunksperloop'"),
        ("type=\"r\"", "type=\"rx\"", 8, "type=\"rx\""),
        ("depid=\"0\" deps=\"1\"", "depid=\"5\" deps=\"1\"", 12, "thread block 5"),
        ("s=\"2\" type=\"r\"", "s=\"3\" type=\"r\"", 8, "step 3"),
        ("send=\"1\" recv=\"1\"", "send=\"-1\" recv=\"1\"", 6, "no peer to send to"),
        // One send less than there are receives.
        ("type=\"s\" srcbuf=\"i\" srcoff=\"1\"", "type=\"cpy\" srcbuf=\"i\" srcoff=\"0\"", 19, "no partner"),
        // Nothing says that the copy comes after what it copies.
        ("depid=\"0\" deps=\"1\"", "depid=\"-1\" deps=\"-1\"", 12, "in no order with the step of line 7"),
        // Receives first on both sides.
        (
            "type=\"s\" srcbuf=\"i\" srcoff=\"1\" dstbuf=\"i\" dstoff=\"1\"",
            "type=\"rcs\" srcbuf=\"i\" srcoff=\"1\" dstbuf=\"i\" dstoff=\"1\"",
            8,
            "no partner",
        ),
        (
            "srcbuf=\"i\" srcoff=\"0\" dstbuf=\"s\"",
            "srcbuf=\"s\" srcoff=\"0\" dstbuf=\"i\"",
            12,
            "holds nothing yet",
        ),
        ("</algo>", "</algo> more", 22, "the end of the file"),
        ("</algo>", "", 23, "expected"),
    ] {
        let wrong = PAIR.replacen(from, to, 1);
        assert_ne!(wrong, PAIR, "{from}");
        let error = import(&wrong).expect_err(to);
        let text = error.to_string();
        assert!(error.line == line && text.contains(part), "{to}: {text}, not line {line} and {part:?}");
    }
}

#[test]
fn thread_blocks_that_wait_for_each_other_are_told() {
    let cyclic = PAIR
        .replacen(
            "cnt=\"1\" depid=\"-1\" deps=\"-1\" hasdep=\"1\"/>",
            "cnt=\"1\" depid=\"1\" deps=\"1\" hasdep=\"1\"/>",
            1,
        )
        .replacen("deps=\"1\" hasdep=\"0\"></step>", "deps=\"1\" hasdep=\"1\"></step>", 1);
    let text = import(&cyclic).unwrap_err().to_string();
    assert!(text.contains("in a cycle"), "{text}");
}

#[test]
fn sizes_are_compared_with_limits_before_anything_is_made_of_them() {
    let many = "<step s=\"0\" type=\"s\" srcbuf=\"i\" srcoff=\"0\" dstbuf=\"i\" dstoff=\"0\" cnt=\"32767\" depid=\"-1\" deps=\"-1\" hasdep=\"0\"/>";
    let mut text = String::from(
        "<algo name=\"n\" nchunksperloop=\"32767\" ngpus=\"1024\" coll=\"allgather\"><gpu id=\"0\" i_chunks=\"1\" o_chunks=\"1\" s_chunks=\"1\"><tb id=\"0\" send=\"1\" recv=\"1\" chan=\"0\">",
    );
    for step in 0..100 {
        text.push_str(&many.replacen("s=\"0\"", &format!("s=\"{step}\""), 1));
    }
    assert!(import(&text).unwrap_err().to_string().contains("more than"));
    let mut text = String::from("<algo ");
    for attribute in 0..100 {
        text.push_str(&format!("a{attribute}=\"1\" "));
    }
    assert!(import(&text).unwrap_err().to_string().contains("attributes"));
}

#[test]
fn no_end_and_no_changed_letter_of_an_xml_panics() {
    for end in (0..PAIR.len()).step_by(3) {
        let _ = import(&PAIR[..end]);
    }
    for at in (0..PAIR.len()).step_by(2) {
        for letter in ["0", "9", "\"", "<", "-"] {
            let changed = format!("{}{letter}{}", &PAIR[..at], &PAIR[at + 1..]);
            if let Ok(schedule) = import(&changed) {
                let _ = verify(schedule);
            }
        }
    }
}

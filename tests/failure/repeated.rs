//! Groups that are joined and left again leave nothing behind, not in this process and not outside.

use pleach::transport::rendezvous::Fabric;

use crate::on_every_fabric;
use crate::ranks::Ranks;

fn groups_in_a_row_leave_no_descriptor_no_thread_and_no_mapping(fabric: Fabric) {
    let mut ranks = Ranks::start(fabric, 3);
    // Making queue pairs takes long on devices that are software.
    let times = if fabric == Fabric::Verbs { 10 } else { 50 };
    ranks.tell_all(&format!("rejoin {times}"));
    for rank in 0..3 {
        let counts = ranks.hear(rank);
        let (early, late) = counts.split_once("; ").expect("are two");
        assert_eq!(early, late, "descriptors, threads, mappings of rank {rank}");
    }
    // The folder is the user's, and keeps the file whose lock says who owns it.
    let left = std::fs::read_dir(ranks.folder())
        .expect("is there")
        .map(|entry| entry.expect("is readable").file_name());
    assert_eq!(left.collect::<Vec<_>>(), ["owner"]);
    ranks.end(0..3);
}

on_every_fabric!(groups_in_a_row_leave_no_descriptor_no_thread_and_no_mapping);

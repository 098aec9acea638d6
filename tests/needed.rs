//! That one binary serves all machines: what only some of them have is no condition for starting
//! it.
//!
//! Read from the binaries themselves: an ELF file lists in its dynamic section the libraries
//! without which it does not start (`DT_NEEDED`; System V ABI, chapter 5, "Dynamic Section").

use std::fs;
use std::path::Path;

/// Libraries that are looked for at run time, by how their names begin.
const OPTIONAL: [&str; 8] = [
    "libibverbs.",
    "librdmacm.",
    "libmlx5.",
    "libcuda.",
    "libcudart.",
    "libnvrtc.",
    "libnccl.",
    "libnvidia-ml.",
];

const PROGRAM_HEADER_LOAD: u64 = 1;
const PROGRAM_HEADER_DYNAMIC: u64 = 2;

const DYNAMIC_END: u64 = 0;
const DYNAMIC_NEEDED: u64 = 1;
const DYNAMIC_STRINGS: u64 = 5;

/// A little-endian number of `bytes` bytes in a file.
fn number(file: &[u8], at: u64, bytes: usize) -> u64 {
    let at = at as usize;
    let field = file.get(at..at + bytes).unwrap_or_else(|| panic!("the file ends before {at}"));
    field.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte))
}

/// What a 64-bit little-endian ELF file needs, in its order.
fn needed(file: &[u8]) -> Vec<String> {
    assert_eq!(&file[..6], b"\x7fELF\x02\x01", "a 64-bit little-endian ELF file");
    let (first, size, count) = (number(file, 32, 8), number(file, 54, 2), number(file, 56, 2));
    let headers: Vec<u64> = (0..count).map(|index| first + index * size).collect();
    let is = |header: &&u64, kind| number(file, **header, 4) == kind;
    let dynamic = headers.iter().find(|header| is(header, PROGRAM_HEADER_DYNAMIC));
    let dynamic = number(file, dynamic.expect("it is linked dynamically") + 8, 8);
    let entries: Vec<(u64, u64)> = (0..)
        .map(|index| (number(file, dynamic + 16 * index, 8), number(file, dynamic + 16 * index + 8, 8)))
        .take_while(|(tag, _)| *tag != DYNAMIC_END)
        .collect();
    let strings = entries.iter().find(|(tag, _)| *tag == DYNAMIC_STRINGS).expect("it has names").1;
    // The table is given by its address in memory.
    let strings = headers
        .iter()
        .filter(|header| is(header, PROGRAM_HEADER_LOAD))
        .find_map(|header| {
            let [offset, address, len] = [8, 16, 32].map(|field| number(file, header + field, 8));
            (address..address + len).contains(&strings).then(|| strings - address + offset)
        })
        .expect("it is loaded");
    let name = |at: u64| {
        let text = &file[(strings + at) as usize..];
        let end = text.iter().position(|byte| *byte == 0).expect("a name ends");
        String::from_utf8_lossy(&text[..end]).into_owned()
    };
    entries.iter().filter(|(tag, _)| *tag == DYNAMIC_NEEDED).map(|(_, at)| name(*at)).collect()
}

fn check(path: &Path) {
    let file = fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let needed = needed(&file);
    // Whoever cannot read the list finds nothing in it.
    assert!(needed.iter().any(|name| name.starts_with("libc.")), "{}: {needed:?}", path.display());
    let wrong: Vec<_> =
        needed.iter().filter(|name| OPTIONAL.iter().any(|begin| name.starts_with(begin))).collect();
    assert!(
        wrong.is_empty(),
        "{} does not start without {wrong:?}; look their functions up at run time",
        path.display()
    );
}

#[test]
#[cfg_attr(
    not(all(
        target_os = "linux",
        target_env = "gnu",
        target_pointer_width = "64",
        target_endian = "little"
    )),
    ignore = "reads dynamically linked 64-bit little-endian ELF files"
)]
fn programs_start_without_libraries_for_rdma_and_gpus() {
    if let Some(command) = option_env!("CARGO_BIN_EXE_pleach") {
        check(Path::new(command));
    }
    // What is linked into this binary is what joins a group over any fabric.
    std::hint::black_box(pleach::Group::join as fn(_) -> _);
    check(&std::env::current_exe().expect("has a path"));
}

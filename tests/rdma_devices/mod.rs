//! The RDMA devices of this machine, for tests whose ranks have one each.

/// An RDMA device by its number, from the first one on again.
pub(crate) fn rdma_device(number: u32) -> String {
    let entries = std::fs::read_dir("/sys/class/infiniband").expect("there are RDMA devices");
    let name = |entry: std::io::Result<std::fs::DirEntry>| {
        entry.expect("readable").file_name().to_string_lossy().into_owned()
    };
    let mut devices: Vec<String> = entries.map(name).collect();
    devices.sort();
    assert!(!devices.is_empty(), "there is no RDMA device");
    devices.swap_remove(number as usize % devices.len())
}

//! What ranks were asked to take, and the versions of what they take it with.

use pleach::transport::verbs::port::Port;
use pleach::transport::verbs::survey::{DeviceReport, OpenDevice};
use pleach::transport::verbs::{Connect, VerbsOptions};

use super::*;

#[test]
fn what_was_asked_for_and_is_not_there_is_mended_by_the_variable_that_asks_for_it() {
    let root = Root::healthy();
    let mut machine = root.machine();
    let device = |name: &str| VerbsOptions { device: Some(name.to_owned()), ..VerbsOptions::default() };
    machine.wish = Ok(device("mlx5_0, mlx5_0:1"));
    assert_eq!(troubles(&machine), []);
    let findings = look(&machine, CHECKS);
    assert_eq!(findings.iter().filter(|finding| finding.subject == "port to use").count(), 2);
    assert!(uses(&machine).matches("GID index 3").count() == 2, "{}", uses(&machine));
    let wishes = [
        (device("mlx5_0,mlx5_7"), "no RDMA device 'mlx5_7'", "export PLEACH_VERBS_DEVICE=mlx5_0:1"),
        (device("mlx5_0:x"), "no RDMA device 'mlx5_0:x'", "export PLEACH_VERBS_DEVICE=mlx5_0:1"),
        (
            VerbsOptions { interface: Some("eth9".to_owned()), ..VerbsOptions::default() },
            "address of eth9",
            "unset PLEACH_INTERFACE   # or: export PLEACH_INTERFACE=ens1np0",
        ),
        (
            VerbsOptions { queue_pairs: Some(99), ..VerbsOptions::default() },
            "take 1 to 16",
            "unset PLEACH_VERBS_QUEUE_PAIRS",
        ),
        (
            VerbsOptions { gid_index: Some(9), ..device("mlx5_1") },
            "no RDMA device 'mlx5_1'",
            "unset PLEACH_VERBS_DEVICE PLEACH_VERBS_GID_INDEX PLEACH_INTERFACE",
        ),
    ];
    for (wish, says, mends) in wishes {
        machine.wish = Ok(wish);
        let (level, subject, text, command) = trouble(&machine);
        assert_eq!((level, subject.as_str(), command.as_str()), (Level::Problem, "port to use", mends));
        assert!(text.contains(says), "{text}");
    }
    machine.wish = Err("PLEACH_VERBS_CONNECT is 'udp'; take 'rendezvous' or 'cm'".to_owned());
    assert_eq!(trouble(&machine).3, "unset PLEACH_VERBS_CONNECT");
}

#[test]
fn of_several_devices_the_one_that_libibverbs_lists_first_is_taken_as_ranks_take_it() {
    let root = Root::healthy();
    let mut machine = root.machine();
    let ports = machine.rdma_ports().expect("there is one").to_vec();
    let other = Port { device: "mlx5_1".to_owned(), ..ports[0].clone() };
    let seen = |name: &str| DeviceReport { name: name.to_owned(), opened: Ok(OpenDevice::default()) };
    machine.verbs = Some(Ok(vec![seen("mlx5_1"), seen("mlx5_0")]));
    let chosen = rdma::choose(&machine, &[ports[0].clone(), other]).expect("both can be used");
    assert_eq!(chosen[0].device, "mlx5_1");
}

#[test]
fn rdma_cm_is_looked_at_where_ranks_are_joined_by_it() {
    let root = Root::healthy();
    let mut machine = root.machine();
    machine.wish = Ok(VerbsOptions { connect: Connect::RdmaCm, ..VerbsOptions::default() });
    machine.rdma_cm = Some(Ok(()));
    let (level, subject, _, command) = trouble(&machine);
    assert_eq!(
        (level, subject.as_str(), command.as_str()),
        (Level::Problem, "rdma_cm file", "sudo modprobe rdma_ucm")
    );
    root.file("dev/infiniband/rdma_cm", "");
    assert_eq!(troubles(&machine), []);
    machine.rdma_cm = Some(Err("librdmacm is not here".to_owned()));
    let (level, subject, _, command) = trouble(&machine);
    assert_eq!((level, subject.as_str()), (Level::Problem, "librdmacm"));
    assert!(command.contains("librdmacm1"), "{command}");
}

#[test]
fn versions_of_library_provider_and_firmware_are_told() {
    let root = Root::healthy();
    root.file("sys/class/infiniband/mlx5_0/fw_ver", "28.39.1002\n");
    let mut machine = root.machine();
    if let Some(Ok(seen)) = &mut machine.verbs
        && let Ok(opened) = &mut seen[0].opened
    {
        opened.provider = Some("libmlx5.so.1.25.50.0".to_owned());
    }
    let findings = look(&machine, CHECKS);
    let text = |subject: &str| {
        let mut of = findings.iter().filter(|finding| finding.subject == subject);
        of.next().unwrap_or_else(|| panic!("nothing about {subject}")).text.clone()
    };
    assert_eq!(text("libibverbs"), "libibverbs.so.1.14.50.0, lists 1 of 1 devices");
    let provider = text("mlx5_0 provider");
    assert!(provider.starts_with("libmlx5.so.1.25.50.0; opened"), "{provider}");
    assert!(provider.ends_with("; firmware 28.39.1002"), "{provider}");
}

#[test]
fn without_the_library_nothing_is_said_to_be_taken() {
    let root = Root::healthy();
    let mut machine = root.machine();
    machine.verbs = Some(Err("libibverbs is not here".to_owned()));
    assert!(uses(&machine).ends_with("--fabric verbs is not possible (libibverbs is not here)"));
    assert!(look(&machine, CHECKS).iter().all(|finding| finding.subject != "port to use"));
    assert_eq!(trouble(&machine).1, "libibverbs");
}

#[test]
fn rdma_beside_a_secret_is_a_warning_because_nothing_encrypts_it() {
    let root = Root::healthy();
    let mut machine = root.machine();
    machine.has_secret = true;
    let (level, subject, text, command) = trouble(&machine);
    assert_eq!((level, subject.as_str()), (Level::Warning, "privacy"));
    assert!(text.contains("encrypts nothing") && command.contains("PLEACH_TLS=require"), "{text}: {command}");
}

//! Compares our types and constants of libibverbs with other bindings: those of `rdma-sys` (from
//! the headers of this system) and of `ibverbs-sys` (from rdma-core 55); and opens a device with
//! them.
//!
//! Only with the feature `verbs-oracle`. **Invariant:** every name of `sys` that this backend uses
//! is compared with both; the last test finds the names in the sources.

use std::collections::BTreeSet;
use std::ffi::CStr;
use std::mem::{align_of, offset_of, size_of};
use std::path::Path;

use super::library::library;
use super::objects::Context;
use super::port::{self, SYSFS};
use super::sys;

/// Asserts that structs are as long there, and that these fields are at the same places. Returns
/// their names.
macro_rules! same_layout {
    ($other:ident: $($name:ident { $($field:ident)* })*) => {
        [$({
            let (ours, theirs) = (size_of::<sys::$name>(), size_of::<$other::$name>());
            assert_eq!(ours, theirs, "bytes of {} ({})", stringify!($name), stringify!($other));
            let (ours, theirs) = (align_of::<sys::$name>(), align_of::<$other::$name>());
            assert_eq!(ours, theirs, "alignment of {} ({})", stringify!($name), stringify!($other));
            same_fields!($other: $name { $($field)* })
        }),*]
    };
}

/// Asserts that these fields are at the same places. Returns the name of the struct.
macro_rules! same_fields {
    ($other:ident: $name:ident { $($field:ident)* }) => {{
        $(let (ours, theirs) = (offset_of!(sys::$name, $field), offset_of!($other::$name, $field));
        assert_eq!(ours, theirs, "place of {}.{} ({})", stringify!($name), stringify!($field), stringify!($other));)*
        stringify!($name)
    }};
}

/// Asserts that constants have the same values there: `modules` of constants, and `flags`, whose
/// values stand in a field.
macro_rules! same_values {
    ($other:ident: modules { $($module:ident: $($constant:ident)*;)* } flags { $($flags:ident: $($flag:ident)*;)* }) => {
        [
            $($({
                let (ours, theirs) = (i64::from(sys::$constant), i64::from($other::$module::$constant));
                assert_eq!(ours, theirs, "{} ({})", stringify!($constant), stringify!($other));
                stringify!($constant)
            },)*)*
            $($({
                let (ours, theirs) = (i64::from(sys::$flag), i64::from($other::$flags::$flag.0));
                assert_eq!(ours, theirs, "{} ({})", stringify!($flag), stringify!($other));
                stringify!($flag)
            },)*)*
        ]
    };
}

/// Its fields up to where it has grown.
macro_rules! same_port_attributes {
    ($other:ident) => {
        same_fields!($other: ibv_port_attr {
            state max_mtu active_mtu gid_tbl_len port_cap_flags max_msg_sz bad_pkey_cntr qkey_viol_cntr pkey_tbl_len lid
            sm_lid lmc max_vl_num sm_sl subnet_timeout init_type_reply active_width active_speed phys_state link_layer
            flags port_cap_flags2
        })
    };
}

/// What both name alike.
macro_rules! same_in {
    ($other:ident) => {{
        let layouts = same_layout! { $other:
            ibv_device { node_type transport_type name dev_name dev_path ibdev_path }
            ibv_context { device ops cmd_fd async_fd num_comp_vectors mutex abi_compat }
            ibv_context_ops { poll_cq req_notify_cq post_srq_recv post_send post_recv alloc_mw bind_mw dealloc_mw }
            ibv_device_attr {
                fw_ver node_guid sys_image_guid max_mr_size page_size_cap vendor_id max_qp max_qp_wr device_cap_flags
                max_sge max_cq max_cqe max_mr max_pd max_qp_rd_atom max_res_rd_atom max_qp_init_rd_atom atomic_cap max_mw
                max_srq max_srq_wr max_srq_sge phys_port_cnt
            }
            ibv_pd { context handle }
            ibv_mr { context pd addr length handle lkey rkey }
            ibv_mw { context pd rkey handle }
            ibv_comp_channel { context fd refcnt }
            ibv_cq { context channel cq_context handle cqe }
            ibv_srq { context srq_context pd handle }
            ibv_srq_attr { max_wr max_sge srq_limit }
            ibv_srq_init_attr { srq_context attr }
            ibv_qp { context qp_context pd send_cq recv_cq srq handle qp_num state qp_type }
            ibv_qp_cap { max_send_wr max_recv_wr max_send_sge max_recv_sge max_inline_data }
            ibv_qp_init_attr { qp_context send_cq recv_cq srq cap qp_type sq_sig_all }
            ibv_qp_attr {
                qp_state cur_qp_state path_mtu path_mig_state qkey rq_psn sq_psn dest_qp_num qp_access_flags cap ah_attr
                alt_ah_attr pkey_index alt_pkey_index en_sqd_async_notify sq_draining max_rd_atomic max_dest_rd_atomic
                min_rnr_timer port_num timeout retry_cnt rnr_retry alt_port_num alt_timeout rate_limit
            }
            ibv_ah_attr { grh dlid sl src_path_bits static_rate is_global port_num }
            ibv_global_route { dgid flow_label sgid_index hop_limit traffic_class }
            ibv_gid { raw global }
            ibv_sge { addr length lkey }
            ibv_recv_wr { wr_id next sg_list num_sge }
            ibv_send_wr { wr_id next sg_list num_sge opcode send_flags wr qp_type }
            ibv_mw_bind_info { mr addr length mw_access_flags }
            ibv_wc { }
        };
        let values = same_values! { $other:
            modules {
                ibv_wc_status:
                    IBV_WC_SUCCESS IBV_WC_LOC_LEN_ERR IBV_WC_LOC_QP_OP_ERR IBV_WC_LOC_EEC_OP_ERR IBV_WC_LOC_PROT_ERR
                    IBV_WC_WR_FLUSH_ERR IBV_WC_MW_BIND_ERR IBV_WC_BAD_RESP_ERR IBV_WC_LOC_ACCESS_ERR
                    IBV_WC_REM_INV_REQ_ERR IBV_WC_REM_ACCESS_ERR IBV_WC_REM_OP_ERR IBV_WC_RETRY_EXC_ERR
                    IBV_WC_RNR_RETRY_EXC_ERR IBV_WC_LOC_RDD_VIOL_ERR IBV_WC_REM_INV_RD_REQ_ERR IBV_WC_REM_ABORT_ERR
                    IBV_WC_INV_EECN_ERR IBV_WC_INV_EEC_STATE_ERR IBV_WC_FATAL_ERR IBV_WC_RESP_TIMEOUT_ERR
                    IBV_WC_GENERAL_ERR;
                ibv_wc_opcode:
                    IBV_WC_SEND IBV_WC_RDMA_WRITE IBV_WC_RDMA_READ IBV_WC_COMP_SWAP IBV_WC_FETCH_ADD IBV_WC_BIND_MW
                    IBV_WC_LOCAL_INV IBV_WC_RECV IBV_WC_RECV_RDMA_WITH_IMM;
                ibv_wr_opcode:
                    IBV_WR_RDMA_WRITE IBV_WR_RDMA_WRITE_WITH_IMM IBV_WR_SEND IBV_WR_SEND_WITH_IMM IBV_WR_RDMA_READ
                    IBV_WR_ATOMIC_CMP_AND_SWP IBV_WR_ATOMIC_FETCH_AND_ADD IBV_WR_LOCAL_INV IBV_WR_BIND_MW;
                ibv_qp_type: IBV_QPT_RC IBV_QPT_UC IBV_QPT_UD;
                ibv_qp_state: IBV_QPS_RESET IBV_QPS_INIT IBV_QPS_RTR IBV_QPS_RTS IBV_QPS_SQD IBV_QPS_SQE IBV_QPS_ERR;
                ibv_port_state: IBV_PORT_DOWN IBV_PORT_INIT IBV_PORT_ARMED IBV_PORT_ACTIVE;
            }
            flags {
                ibv_access_flags:
                    IBV_ACCESS_LOCAL_WRITE IBV_ACCESS_REMOTE_WRITE IBV_ACCESS_REMOTE_READ IBV_ACCESS_REMOTE_ATOMIC
                    IBV_ACCESS_MW_BIND IBV_ACCESS_ZERO_BASED IBV_ACCESS_ON_DEMAND IBV_ACCESS_RELAXED_ORDERING;
                ibv_qp_attr_mask:
                    IBV_QP_STATE IBV_QP_CUR_STATE IBV_QP_ACCESS_FLAGS IBV_QP_PKEY_INDEX IBV_QP_PORT IBV_QP_AV
                    IBV_QP_PATH_MTU IBV_QP_TIMEOUT IBV_QP_RETRY_CNT IBV_QP_RNR_RETRY IBV_QP_RQ_PSN
                    IBV_QP_MAX_QP_RD_ATOMIC IBV_QP_MIN_RNR_TIMER IBV_QP_SQ_PSN IBV_QP_MAX_DEST_RD_ATOMIC IBV_QP_CAP
                    IBV_QP_DEST_QPN;
                ibv_wc_flags: IBV_WC_GRH IBV_WC_WITH_IMM IBV_WC_WITH_INV;
                ibv_send_flags:
                    IBV_SEND_FENCE IBV_SEND_SIGNALED IBV_SEND_SOLICITED IBV_SEND_INLINE;
            }
        };
        layouts.iter().chain(values.iter()).copied().collect::<BTreeSet<&str>>()
    }};
}

#[test]
fn types_and_constants_are_those_of_this_systems_headers() {
    // Where its fields have names of their own, they are looked at one by one.
    same_fields!(rdma_sys: ibv_wc { wr_id status opcode vendor_err byte_len qp_num src_qp wc_flags pkey_index slid sl dlid_path_bits });
    let (ours, theirs) = (size_of::<sys::ibv_port_attr>(), size_of::<rdma_sys::ibv_port_attr>());
    assert_eq!(ours, theirs, "bytes of ibv_port_attr");
    same_port_attributes!(rdma_sys);
    let theirs = offset_of!(rdma_sys::ibv_send_wr, imm_data_invalidated_rkey_union);
    assert_eq!(offset_of!(sys::ibv_send_wr, __bindgen_anon_1), theirs, "the immediate of a request");
    let theirs = offset_of!(rdma_sys::ibv_wc, imm_data_invalidated_rkey_union);
    assert_eq!(offset_of!(sys::ibv_wc, __bindgen_anon_1), theirs, "the immediate of a completion");
    type OurWrite = sys::ibv_send_wr__bindgen_ty_2__bindgen_ty_1;
    type OurAtomic = sys::ibv_send_wr__bindgen_ty_2__bindgen_ty_2;
    use rdma_sys::{atomic_t as TheirAtomic, rdma_t as TheirWrite};
    let writes = [size_of::<OurWrite>(), offset_of!(OurWrite, remote_addr), offset_of!(OurWrite, rkey)];
    let theirs = [size_of::<TheirWrite>(), offset_of!(TheirWrite, remote_addr), offset_of!(TheirWrite, rkey)];
    assert_eq!(writes, theirs, "a write's target");
    macro_rules! places {
        ($atomic:ty) => {
            [
                size_of::<$atomic>(),
                offset_of!($atomic, remote_addr),
                offset_of!($atomic, compare_add),
                offset_of!($atomic, swap),
                offset_of!($atomic, rkey),
            ]
        };
    }
    assert_eq!(places!(OurAtomic), places!(TheirAtomic), "an atomic's operands");
    type OurBinding = sys::ibv_send_wr__bindgen_ty_4__bindgen_ty_1;
    use rdma_sys::bind_mw_t as TheirBinding;
    macro_rules! places {
        ($binding:ty) => {
            [
                size_of::<$binding>(),
                offset_of!($binding, mw),
                offset_of!($binding, rkey),
                offset_of!($binding, bind_info),
            ]
        };
    }
    assert_eq!(places!(OurBinding), places!(TheirBinding), "what binds a memory window");
    let theirs = offset_of!(rdma_sys::ibv_send_wr, bind_mw_tso_union);
    assert_eq!(offset_of!(sys::ibv_send_wr, __bindgen_anon_2), theirs, "where a request has it");
    assert!(same_in!(rdma_sys).len() > 100);
}

#[test]
fn types_and_constants_are_those_of_newer_headers() {
    // It has grown since, at its end, where the library is told how long ours is by which function
    // is called.
    assert!(size_of::<sys::ibv_port_attr>() <= size_of::<ibverbs_sys::ibv_port_attr>());
    same_port_attributes!(ibverbs_sys);
    same_fields!(ibverbs_sys: ibv_wc { qp_num src_qp wc_flags pkey_index slid sl dlid_path_bits });
    let theirs = offset_of!(ibverbs_sys::ibv_wc, imm_data);
    assert_eq!(offset_of!(sys::ibv_wc, __bindgen_anon_1), theirs, "the immediate of a completion");
    assert!(same_in!(ibverbs_sys).len() > 100);
}

/// What the sources of this folder and those below it name of libibverbs.
fn names_used(folder: &Path, used: &mut BTreeSet<String>) {
    for entry in std::fs::read_dir(folder).expect("the sources are there") {
        let path = entry.expect("readable").path();
        if path.is_dir() {
            names_used(&path, used);
        }
        if path.extension().is_none_or(|ending| ending != "rs") || path.ends_with("oracle.rs") {
            continue;
        }
        let text = std::fs::read_to_string(&path).expect("readable");
        for (at, _) in text.match_indices("sys::") {
            let name: String = text[at + 5..]
                .chars()
                .take_while(|letter| letter.is_ascii_alphanumeric() || *letter == '_')
                .collect();
            if name.to_ascii_lowercase().starts_with("ibv_") {
                used.insert(name);
            }
        }
    }
}

#[test]
fn all_that_is_used_is_compared() {
    let mut compared = same_in!(rdma_sys);
    // Numbers, and what is compared by hand above.
    assert_eq!(size_of::<sys::ibv_mtu>(), size_of::<rdma_sys::ibv_mtu::Type>());
    assert_eq!(size_of::<sys::ibv_qp_state>(), size_of::<rdma_sys::ibv_qp_state::Type>());
    compared.extend(["ibv_mtu", "ibv_qp_state", "ibv_port_attr", "ibv_send_wr__bindgen_ty_2__bindgen_ty_1"]);
    compared.extend(["ibv_send_wr__bindgen_ty_2__bindgen_ty_2", "ibv_send_wr__bindgen_ty_4__bindgen_ty_1"]);
    assert_eq!(sys::IBV_MW_TYPE_2, rdma_sys::ibv_mw_type::IBV_MW_TYPE_2, "the kind of memory windows");
    assert_eq!(sys::IBV_MW_TYPE_2, ibverbs_sys::IBV_MW_TYPE_2, "the kind of memory windows");
    compared.insert("IBV_MW_TYPE_2");
    // Flags in one of them, numbers in the other.
    macro_rules! same_flags {
        ($($flag:ident)*) => {
            $(assert_eq!(sys::$flag, rdma_sys::ibv_device_cap_flags::$flag.0, stringify!($flag));
            assert_eq!(sys::$flag, ibverbs_sys::$flag, stringify!($flag));
            compared.insert(stringify!($flag));)*
        };
    }
    same_flags!(IBV_DEVICE_MEM_WINDOW_TYPE_2A IBV_DEVICE_MEM_WINDOW_TYPE_2B);
    let mut used = BTreeSet::new();
    names_used(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src/verbs"), &mut used);
    assert!(used.len() > 50, "only {used:?}");
    let missing: Vec<_> = used.iter().filter(|name| !compared.contains(name.as_str())).collect();
    assert!(missing.is_empty(), "compare these too: {missing:?}");
}

#[test]
#[ignore = "needs RDMA devices: where there are some, run it with --ignored verbs::"]
fn devices_opened_by_others_bindings_say_the_same() {
    let library = library().expect("libibverbs is here");
    let names = super::objects::device_names(library).expect("devices are listed");
    let ports = port::ports(Path::new(SYSFS), &names).expect("sysfs is readable");
    let theirs = ibverbs::devices().expect("devices are listed");
    assert_eq!(theirs.iter().count(), names.len());
    assert!(!names.is_empty());
    for (device, name) in theirs.iter().zip(&names) {
        assert_eq!(device.name().map(CStr::to_string_lossy).as_deref(), Some(name.as_str()));
        let context = device.open().expect("it opens");
        // GIDs of port 1, by number: the same addresses in the same places.
        let ours = ports.iter().find(|port| port.device == *name && port.number == 1).expect("it has a port");
        let table = context.gid_table();
        for gid in &ours.gids {
            let entry = table.iter().find(|entry| entry.gid_index == gid.index && entry.port_num == 1);
            let theirs = entry.unwrap_or_else(|| panic!("{name} has no GID {}", gid.index)).gid;
            let theirs = [theirs.subnet_prefix().to_be_bytes(), theirs.interface_id().to_be_bytes()].concat();
            assert_eq!(theirs, gid.address.octets(), "{name}: GID {}", gid.index);
        }
        assert!(!ours.gids.is_empty(), "{name} has GIDs");
    }
}

#[test]
#[ignore = "needs RDMA devices: where there are some, run it with --ignored verbs::"]
fn limits_and_ports_read_by_others_bindings_are_the_same() {
    let library = library().expect("libibverbs is here");
    let names = super::objects::device_names(library).expect("devices are listed");
    assert!(!names.is_empty());
    for (index, name) in names.iter().enumerate() {
        let context = Context::open(library, name).expect("it opens").expect("it is there");
        let (ours, our_port) = (context.limits().expect("it tells"), context.port(1).expect("it tells"));
        // SAFETY: their functions with their own types; what they fill is plain numbers, of which
        // zero is one.
        let (theirs, their_port) = unsafe {
            let list = rdma_sys::ibv_get_device_list(std::ptr::null_mut());
            let context = rdma_sys::ibv_open_device(*list.add(index));
            assert!(!context.is_null(), "{name} opens");
            let mut limits: rdma_sys::ibv_device_attr = std::mem::zeroed();
            assert_eq!(rdma_sys::ibv_query_device(context, &raw mut limits), 0);
            let mut port: rdma_sys::ibv_port_attr = std::mem::zeroed();
            assert_eq!(rdma_sys::___ibv_query_port(context, 1, &raw mut port), 0);
            rdma_sys::ibv_close_device(context);
            rdma_sys::ibv_free_device_list(list);
            (limits, port)
        };
        macro_rules! same {
            ($ours:ident $theirs:ident: $($field:ident)*) => {
                $(assert_eq!(i128::from($ours.$field), i128::from($theirs.$field), "{name}: {}", stringify!($field));)*
            };
        }
        same!(ours theirs: node_guid max_mr_size page_size_cap max_qp max_qp_wr device_cap_flags max_sge max_cq max_cqe max_mr
            max_qp_rd_atom max_qp_init_rd_atom max_srq max_srq_wr phys_port_cnt max_mw);
        same!(our_port their_port: state max_mtu active_mtu gid_tbl_len max_msg_sz lid link_layer active_width active_speed);
    }
}

/* Makes the wheel's library run with glibc 2.28, which is what torch's wheels ask for (manylinux_2_28), when a newer one
 * builds it: these functions got new versions since, and the old ones are still there. Only wheels are built with this. */
#if defined(__x86_64__) && defined(__linux__)
__asm__(".symver pow, pow@GLIBC_2.2.5");
__asm__(".symver pthread_create, pthread_create@GLIBC_2.2.5");
__asm__(".symver pthread_once, pthread_once@GLIBC_2.2.5");
__asm__(".symver pthread_key_create, pthread_key_create@GLIBC_2.2.5");
__asm__(".symver pthread_getspecific, pthread_getspecific@GLIBC_2.2.5");
__asm__(".symver pthread_setspecific, pthread_setspecific@GLIBC_2.2.5");
#endif
